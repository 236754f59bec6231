"""Simulations of many small operations: a rigid-body step and the gradient of a quantum circuit.

Both are written here, in the manner of brax and MuJoCo-MJX (one array per body, quaternions,
contacts by penalty) and of PennyLane (a state vector with an axis per qubit, a tensor product per
gate). They have more than a thousand equations and little to gain.
"""

import jax
import jax.numpy as jnp
from sources import normal

BODIES, QUBITS, LAYERS = 10, 10, 2
HALF, STEP_S = 0.2, 2e-3  # half the length of a body in m; a step in s
CORNERS = jnp.array([[x, y, z] for x in (-0.1, 0.1) for y in (-0.1, 0.1) for z in (-HALF, HALF)])


def rigid_bodies():
    """Five steps of a chain of capsules that falls on the ground."""
    position = jnp.stack([jnp.array([0.3 * k, 0.0, 0.5 + 0.05 * k]) for k in range(BODIES)])
    turned = normal(BODIES, 4, scale=0.1) + jnp.array([1.0, 0.0, 0.0, 0.0])
    turned = turned / jnp.linalg.norm(turned, axis=-1, keepdims=True)
    state = position, turned, normal(BODIES, 3, seed=1, scale=0.1), jnp.zeros((BODIES, 3))

    def simulate(state, torques):
        step = lambda s, _: (chain_step(s, torques), None)  # noqa: E731
        return jax.lax.scan(step, state, None, length=5)[0]

    return simulate, (state, normal(BODIES - 1, 3, seed=2))


def chain_step(state, torques):
    """Advance positions, quaternions and both velocities by one step."""
    bodies = [tuple(x[k] for x in state) for k in range(BODIES)]
    forces = [contact(*body) for body in bodies]
    for k, torque in enumerate(torques):
        upper, lower = bodies[k], bodies[k + 1]
        pull, turn_upper, turn_lower = joint(upper, lower, torque)
        forces[k] = forces[k][0] + pull, forces[k][1] + turn_upper
        forces[k + 1] = forces[k + 1][0] - pull, forces[k + 1][1] + turn_lower
    moved = [advance(body, *force) for body, force in zip(bodies, forces, strict=True)]
    return tuple(jnp.stack(parts) for parts in zip(*moved, strict=True))


def contact(position, quaternion, velocity, spin):
    """Force and torque of the ground on the corners of a body: a penalty, and friction."""
    force, torque = jnp.array([0.0, 0.0, -9.81]), jnp.zeros(3)
    for corner in CORNERS[::2]:
        arm = rotate(quaternion, corner)
        speed = velocity + jnp.cross(spin, arm)
        depth = jnp.maximum(-(position + arm)[2], 0.0)
        push = jnp.where(depth > 0, 400.0 * depth - 2.0 * speed[2], 0.0)
        slide = jnp.clip(-5.0 * speed[:2], -0.8 * push, 0.8 * push)
        at_corner = jnp.concatenate([slide, push[None]])
        force, torque = force + at_corner, torque + jnp.cross(arm, at_corner)
    return force, torque


def joint(upper, lower, motor):
    """Force on the upper body, and the torques on both, of a spring between their ends."""
    arms = [rotate(b[1], jnp.array([0.0, 0.0, s])) for b, s in ((upper, HALF), (lower, -HALF))]
    speeds = [b[2] + jnp.cross(b[3], arm) for b, arm in zip((upper, lower), arms, strict=True)]
    pull = 300.0 * (lower[0] + arms[1] - upper[0] - arms[0]) + 3.0 * (speeds[1] - speeds[0])
    bend = product(conjugate(upper[1]), lower[1])[1:]
    turn = rotate(upper[1], jnp.tanh(motor) + 2.0 * bend) + 0.1 * (lower[3] - upper[3])
    return pull, jnp.cross(arms[0], pull) + turn, -jnp.cross(arms[1], pull) - turn


def advance(body, force, torque):
    """One semi-implicit step of Euler with a diagonal inertia."""
    position, quaternion, velocity, spin = body
    inertia = jnp.array([0.02, 0.02, 0.005])
    local = rotate(conjugate(quaternion), spin)
    twist = rotate(conjugate(quaternion), torque) - jnp.cross(local, inertia * local)
    spin = spin + STEP_S * rotate(quaternion, twist / inertia)
    velocity = velocity + STEP_S * force
    turn = product(jnp.concatenate([jnp.zeros(1), spin]), quaternion)
    quaternion = quaternion + 0.5 * STEP_S * turn
    quaternion = quaternion / jnp.sqrt(jnp.sum(quaternion**2))
    return position + STEP_S * velocity, quaternion, velocity, spin


def product(p, q):
    """The product of two quaternions, by components."""
    return jnp.stack(
        [
            p[0] * q[0] - p[1] * q[1] - p[2] * q[2] - p[3] * q[3],
            p[0] * q[1] + p[1] * q[0] + p[2] * q[3] - p[3] * q[2],
            p[0] * q[2] - p[1] * q[3] + p[2] * q[0] + p[3] * q[1],
            p[0] * q[3] + p[1] * q[2] - p[2] * q[1] + p[3] * q[0],
        ]
    )


def conjugate(q):
    return q * jnp.array([1.0, -1.0, -1.0, -1.0])


def rotate(q, v):
    """A vector turned by a quaternion."""
    real, u = q[0], q[1:]
    turned = 2.0 * jnp.dot(u, v) * u + (real**2 - jnp.dot(u, u)) * v
    return turned + 2.0 * real * jnp.cross(u, v)


def circuit():
    """The gradient of a sum of measured qubits by the angles of rotations between CNOTs."""

    def energy(angles):
        state = jnp.zeros((2,) * QUBITS, jnp.complex64).at[(0,) * QUBITS].set(1)
        for layer in angles:
            for k in range(QUBITS):
                state = apply(about_y(layer[k, 0]), state, k)
                state = apply(about_z(layer[k, 1]), state, k)
            for k in range(QUBITS - 1):
                state = controlled_not(state, k, k + 1)
        return sum(measured(state, k) for k in range(QUBITS))

    return jax.value_and_grad(energy), (normal(LAYERS, QUBITS, 2),)


def apply(gate, state, qubit):
    return jnp.moveaxis(jnp.tensordot(gate, state, [[1], [qubit]]), 0, qubit)


def about_y(angle):
    c, s = jnp.cos(angle / 2), jnp.sin(angle / 2)
    return jnp.array([[c, -s], [s, c]]).astype(jnp.complex64)


def about_z(angle):
    phase = jnp.exp(-0.5j * angle)
    return jnp.diag(jnp.stack([phase, jnp.conj(phase)])).astype(jnp.complex64)


def controlled_not(state, control, target):
    """Flip the target where the control is one."""
    gate = jnp.array([[[[1, 0], [0, 1]], [[0, 0], [0, 0]]], [[[0, 0], [0, 0]], [[0, 1], [1, 0]]]])
    gate = jnp.transpose(gate, (0, 2, 1, 3)).astype(state.dtype)
    made = jnp.tensordot(gate, state, [[2, 3], [control, target]])
    return jnp.moveaxis(made, (0, 1), (control, target))


def measured(state, qubit):
    """The expectation of Z on one qubit."""
    others = tuple(k for k in range(QUBITS) if k != qubit)
    up, down = jnp.sum(jnp.abs(state) ** 2, others)
    return up - down


MODELS = {"rigid-body chain, 5 steps": rigid_bodies, "quantum circuit, gradient": circuit}
