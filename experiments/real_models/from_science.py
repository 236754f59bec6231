"""Science: differential equations, molecular dynamics, fluids, log-densities."""

import diffrax
import jax
import jax.numpy as jnp
import jax_md
import numpyro
import numpyro.distributions as dist
from jax.experimental import ode
from numpyro.infer.util import log_density
from sources import normal


def neural_ode():
    """Dopri5 with adaptive steps on a neural vector field."""
    weights = [normal(32, 64, scale=0.2), normal(64, 32, scale=0.2)]

    def field(t, y, weights):
        return jnp.tanh(y @ weights[0]) @ weights[1] - 0.1 * y

    def solve(weights, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Dopri5(),
            t0=0.0,
            t1=2.0,
            dt0=0.1,
            y0=y0,
            args=weights,
            stepsize_controller=diffrax.PIDController(rtol=1e-4, atol=1e-4),
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 2.0, 9)),
        )
        return solution.ys

    return solve, (weights, normal(16, 32, seed=1))


def lotka_volterra():
    """`jax.experimental.ode.odeint` and its gradient by the parameters."""

    def field(y, t, rates):
        prey, hunter = y
        a, b, c, d = rates
        return jnp.stack([a * prey - b * prey * hunter, c * prey * hunter - d * hunter])

    def loss(rates, y0, times):
        return jnp.sum(ode.odeint(field, y0, times, rates) ** 2)

    args = jnp.array([1.1, 0.4, 0.1, 0.4]), jnp.array([10.0, 5.0]), jnp.linspace(0.0, 4.0, 12)
    return jax.value_and_grad(loss), args


def lennard_jones():
    """Forces of all pairs in a periodic box, written with jax_md."""
    displacement, _ = jax_md.space.periodic(8.0)
    energy = jax_md.energy.lennard_jones_pair(displacement)
    return jax_md.quantity.force(energy), (lattice(8),)


def lattice(side: int) -> jax.Array:
    """Positions near a cubic lattice in a box of 8: float32[side**3, 3]."""
    grid = jnp.stack(jnp.meshgrid(*[jnp.arange(side) * (8 / side)] * 3), -1).reshape(-1, 3)
    return grid + normal(*grid.shape, scale=0.02)


def gravity():
    """Velocity Verlet with softened gravity between all pairs, as one writes it."""

    def potential(x, mass):
        gap = x[:, None] - x[None, :]
        distance = jnp.sqrt(jnp.sum(gap**2, -1) + 1e-2)
        return -0.5 * jnp.sum(mass[:, None] * mass[None, :] / distance)

    def simulate(x, v, mass):
        def step(state, _):
            x, v = state
            v = v - 0.005 * jax.grad(potential)(x, mass) / mass[:, None]
            x = x + 0.01 * v
            v = v - 0.005 * jax.grad(potential)(x, mass) / mass[:, None]
            return (x, v), potential(x, mass)

        return jax.lax.scan(step, (x, v), length=10)

    return simulate, (normal(256, 3), normal(256, 3, seed=1), jnp.full(256, 1 / 256))


def navier_stokes():
    """Two-dimensional vorticity equation, pseudo-spectral, Runge-Kutta of second order."""

    def step(w, size=64, viscosity=1e-3, dt=1e-2):
        k = jnp.fft.fftfreq(size, 1 / size)
        kx, ky = k[:, None], k[None, :]
        square = jnp.where(kx**2 + ky**2 == 0, 1.0, kx**2 + ky**2)

        def rate(w_hat):
            stream = w_hat / square
            u, v = jnp.fft.ifft2(1j * ky * stream).real, jnp.fft.ifft2(-1j * kx * stream).real
            wx, wy = jnp.fft.ifft2(1j * kx * w_hat).real, jnp.fft.ifft2(1j * ky * w_hat).real
            keep = (jnp.abs(kx) < size / 3) & (jnp.abs(ky) < size / 3)
            return -jnp.fft.fft2(u * wx + v * wy) * keep - viscosity * square * w_hat

        w_hat = jnp.fft.fft2(w)
        half = w_hat + 0.5 * dt * rate(w_hat)
        return jnp.fft.ifft2(w_hat + dt * rate(half)).real

    def simulate(w):
        return jax.lax.fori_loop(0, 10, lambda _, w: step(w), w)

    return simulate, (normal(64, 64),)


def lattice_boltzmann():
    """D2Q9 with the BGK collision, 20 steps."""
    velocities = jnp.array(
        [(0, 0), (1, 0), (0, 1), (-1, 0), (0, -1), (1, 1), (-1, 1), (-1, -1), (1, -1)]
    )
    weights = jnp.array([4 / 9] + [1 / 9] * 4 + [1 / 36] * 4)

    def equilibrium(density, u):
        cu = jnp.einsum("qd,xyd->qxy", velocities.astype(jnp.float32), u)
        speed = jnp.sum(u**2, -1)
        return weights[:, None, None] * density * (1 + 3 * cu + 4.5 * cu**2 - 1.5 * speed)

    def step(f, _):
        density = f.sum(0)
        u = jnp.einsum("qxy,qd->xyd", f, velocities.astype(jnp.float32)) / density[..., None]
        f = f - (f - equilibrium(density, u)) / 0.6
        f = jnp.stack([jnp.roll(f[q], velocities_static[q], (0, 1)) for q in range(9)])
        return f, density.mean()

    velocities_static = [tuple(map(int, v)) for v in velocities]

    def simulate(density, u):
        return jax.lax.scan(step, equilibrium(density, u), length=20)

    return simulate, (1 + normal(48, 48, scale=0.01), normal(48, 48, 2, seed=1, scale=0.05))


def hierarchical_regression():
    """The log-density of a numpyro model and its gradient."""

    def model(x, group, y=None):
        mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
        with numpyro.plate("groups", 20):
            offset = numpyro.sample("offset", dist.Normal(mean, spread))
        weights = numpyro.sample("weights", dist.Normal(jnp.zeros(16), 1.0).to_event(1))
        noise = numpyro.sample("noise", dist.HalfNormal(1.0))
        numpyro.sample("y", dist.Normal(x @ weights + offset[group], noise), obs=y)

    def density(values, x, group, y):
        return log_density(model, (x, group), {"y": y}, values)[0]

    values = {
        "mean": jnp.float32(0.1),
        "spread": jnp.float32(0.8),
        "offset": normal(20),
        "weights": normal(16, seed=1),
        "noise": jnp.float32(0.5),
    }
    x = normal(400, 16, seed=2)
    return jax.value_and_grad(density), (values, x, jnp.arange(400) % 20, normal(400, seed=3))


def gaussian_process():
    """The log marginal likelihood of a Gaussian process and its gradient."""

    def density(scales, x, y):
        length, height, noise = jnp.exp(scales)
        gap = jnp.sum((x[:, None] - x[None, :]) ** 2, -1)
        kernel = height * jnp.exp(-0.5 * gap / length**2) + noise * jnp.eye(len(x))
        factor = jnp.linalg.cholesky(kernel)
        alpha = jax.scipy.linalg.cho_solve((factor, True), y)
        return -0.5 * y @ alpha - jnp.sum(jnp.log(jnp.diag(factor)))

    return jax.value_and_grad(density), (jnp.zeros(3), normal(128, 3), normal(128, seed=1))


MODELS = {
    "diffrax neural ODE": neural_ode,
    "odeint and its gradient": lotka_volterra,
    "jax_md Lennard-Jones force": lennard_jones,
    "gravity, velocity Verlet": gravity,
    "Navier-Stokes, pseudo-spectral": navier_stokes,
    "lattice Boltzmann": lattice_boltzmann,
    "numpyro log-density and gradient": hierarchical_regression,
    "Gaussian process likelihood": gaussian_process,
}
