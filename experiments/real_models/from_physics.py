"""Rigid bodies as physics engines step them: brax's generalised coordinates and MuJoCo-MJX."""

import functools

import jax
import mujoco
from brax import envs
from mujoco import mjx

CHAIN, BALLS = 4, 2
MODEL = """
<mujoco>
  <option iterations="4" ls_iterations="6"/>
  <worldbody> <geom type="plane" size="5 5 1"/> {} </worldbody>
</mujoco>
"""


def link(depth: int) -> str:
    """A capsule on a hinge, with the rest of the chain below it."""
    if depth == CHAIN:
        return ""
    axis = "0 1 0" if depth % 2 else "1 0 0"
    return (
        f"<body pos='0 0 {0.9 if depth == 0 else -0.2}'><joint type='hinge' axis='{axis}'/>"
        f"<geom type='capsule' size='0.04' fromto='0 0 0 0 0 -0.2'/>{link(depth + 1)}</body>"
    )


def ball(number: int) -> str:
    return f"<body pos='{0.3 * number} 0.2 0.2'><freejoint/><geom type='sphere' size='0.1'/></body>"


def mjx_step():
    """One step of a chain on hinges and of balls that meet it and the ground."""
    bodies = link(0) + "".join(map(ball, range(BALLS)))
    model = mjx.put_model(mujoco.MjModel.from_xml_string(MODEL.format(bodies)), impl="jax")
    return functools.partial(mjx.step, model), (mjx.make_data(model),)


def brax_step():
    """One step of the ant in generalised coordinates."""
    environment = envs.get_environment("ant", backend="generalized")
    state = jax.jit(environment.reset)(jax.random.key(0))
    return environment.step, (state, jax.numpy.zeros(environment.action_size))


MODELS = {"brax, a step of the ant": brax_step, "MuJoCo-MJX, a step": mjx_step}
