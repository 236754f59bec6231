"""Graphs, reinforcement learning, sampling and equivariant networks."""

import blackjax
import distrax
import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import jraph
import mctx
import rlax
from sources import integers, normal


def graph_network():
    """Two steps of message passing on a random graph."""
    nodes, edges, width = 200, 1000, 32
    graph = jraph.GraphsTuple(
        nodes=normal(nodes, width),
        edges=normal(edges, width, seed=1),
        senders=integers(nodes, edges, seed=2),
        receivers=integers(nodes, edges, seed=3),
        globals=normal(1, width, seed=4),
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([edges]),
    )
    weights = {
        "edge": normal(4 * width, width, seed=5, scale=0.1),
        "node": normal(4 * width, width, seed=6, scale=0.1),
        "attention": normal(width, 1, seed=7),
    }

    def apply(weights, graph):
        net = jraph.GraphNetwork(
            update_edge_fn=lambda e, s, r, g: jax.nn.relu(
                jnp.concatenate([e, s, r, g], -1) @ weights["edge"]
            ),
            update_node_fn=lambda n, s, r, g: jax.nn.relu(
                jnp.concatenate([n, s, r, g], -1) @ weights["node"]
            ),
            attention_logit_fn=lambda e, s, r, g: e @ weights["attention"],
            attention_reduce_fn=lambda e, w: e * w,
        )
        return net(net(graph)).nodes

    return apply, (weights, graph)


def policy_loss():
    """A V-trace actor-critic loss with a distrax policy, and its gradient."""
    steps, batch, width, actions = 20, 16, 32, 6

    def loss(weights, observations, taken, rewards, behaviour):
        hidden = jax.nn.relu(observations @ weights["body"])
        policy = distrax.Categorical(logits=hidden @ weights["policy"])
        values = (hidden @ weights["value"])[..., 0]
        ratio = jnp.exp(policy.log_prob(taken) - behaviour)
        vtrace = jax.vmap(rlax.vtrace_td_error_and_advantage, in_axes=1, out_axes=1)
        discounts = jnp.full_like(rewards, 0.99)
        out = vtrace(values[:-1], values[1:], rewards[:-1], discounts[:-1], ratio[:-1])
        weigh = jnp.ones(steps - 1)
        gradient_loss = jax.vmap(rlax.policy_gradient_loss, in_axes=(1, 1, 1, None))
        actor = gradient_loss(policy.logits[:-1], taken[:-1], out.pg_advantage, weigh).mean()
        return actor + 0.5 * jnp.mean(out.errors**2) - 0.01 * policy.entropy().mean()

    weights = {
        "body": normal(width, 64, scale=0.2),
        "policy": normal(64, actions, seed=1, scale=0.2),
        "value": normal(64, 1, seed=2, scale=0.2),
    }
    data = (
        normal(steps, batch, width, seed=3),
        integers(actions, steps, batch, seed=4),
        normal(steps, batch, seed=5),
        -jnp.abs(normal(steps, batch, seed=6)),
    )
    return jax.value_and_grad(loss), (weights, *data)


def hamiltonian_step():
    """One step of Hamiltonian Monte Carlo on a logistic regression."""

    def density(w, x, y):
        logits = x @ w
        return jnp.sum(y * logits - jax.nn.softplus(logits)) - 0.5 * w @ w

    def step(key, w, x, y):
        hmc = blackjax.hmc(
            lambda w: density(w, x, y), 1e-2, jnp.ones(w.shape[0]), num_integration_steps=8
        )
        state, info = hmc.step(key, hmc.init(w))
        return state.position, info.acceptance_rate

    x = normal(300, 20)
    return step, (jax.random.key(0), normal(20, seed=1), x, (x[:, 0] > 0).astype(jnp.float32))


def tree_search():
    """Gumbel MuZero with a linear model of the world."""
    batch, actions, width = 8, 4, 16

    def recurrent(weights, key, action, state):
        state = jnp.tanh(state @ weights["state"] + weights["action"][action])
        out = mctx.RecurrentFnOutput(
            reward=state[:, 0],
            discount=jnp.full(action.shape, 0.9),
            prior_logits=state @ weights["policy"],
            value=state[:, 1],
        )
        return out, state

    def search(weights, key, state):
        root = mctx.RootFnOutput(
            prior_logits=state @ weights["policy"], value=state[:, 1], embedding=state
        )
        out = mctx.gumbel_muzero_policy(weights, key, root, recurrent, num_simulations=12)
        return out.action, out.action_weights

    weights = {
        "state": normal(width, width, scale=0.3),
        "action": normal(actions, width, seed=1),
        "policy": normal(width, actions, seed=2),
    }
    return search, (weights, jax.random.key(1), normal(batch, width, seed=3))


def equivariant_messages():
    """Tensor products of node features with spherical harmonics, summed over neighbours."""
    nodes, edges = 64, 512

    def apply(features, positions, senders, receivers):
        directions = e3nn.IrrepsArray("1o", positions[senders] - positions[receivers])
        harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", directions, normalize=True)
        features = e3nn.IrrepsArray("8x0e + 8x1o", features)
        messages = e3nn.tensor_product(features[senders], harmonics)
        return e3nn.scatter_sum(messages, dst=receivers, output_size=nodes).array

    return apply, (
        normal(nodes, 32),
        normal(nodes, 3, seed=1),
        integers(nodes, edges, seed=2),
        integers(nodes, edges, seed=3),
    )


MODELS = {
    "jraph graph network": graph_network,
    "rlax V-trace with distrax, gradient": policy_loss,
    "blackjax HMC step": hamiltonian_step,
    "mctx Gumbel MuZero search": tree_search,
    "e3nn equivariant messages": equivariant_messages,
}
