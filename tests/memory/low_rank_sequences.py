"""Sequences of the authors' step functions, on single matrices and a bias, and runs beside them."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

REFERENCE = pathlib.Path(__file__).parents[1] / "data" / "low_rank_reference.npz"
LEAVES = ("wide", "tall", "square")
RATE, RANK, EVERY = 0.05, 3, 10
# Where eps stands in a formula makes no difference then.
adam = functools.partial(optax.scale_by_adam, eps=1e-30)


@functools.cache
def reference():
    """All arrays of the file: params0, grads, and the params after some `steps` of each sequence."""
    with np.load(REFERENCE) as data:
        return dict(data)


def of_leaf(name, leaf):
    """The matrix and the bias."""
    data = reference()
    return {"matrix": data[f"{name}_{leaf}"], "bias": data[f"{name}_bias"]}


def sequence(tx, leaf):
    """The params after each of the steps that the reference holds, of float64."""

    def step(carry, grads):
        params, opt_state = carry
        updates, opt_state = tx.update(grads, opt_state, params)
        params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
        return (params, opt_state), params

    @jax.jit
    def run(params, grads):
        return jax.lax.scan(step, (params, tx.init(params)), grads)[1]

    trail = run(*(jax.tree.map(jnp.asarray, of_leaf(name, leaf)) for name in ("params0", "grads")))
    return jax.tree.map(lambda x: x[reference()["steps"]], trail)


def without_correction():
    """Adam's direction as the authors limit it: without bias correction."""
    tx = adam()

    def update(g, state, params=None):
        u, state = tx.update(g, state, params)
        return optax.tree.scale(1 / _correction(state.count), u), state

    return optax.GradientTransformation(tx.init, update)


def _correction(t):
    return jnp.sqrt(1 - 0.999 ** t.astype(float)) / (1 - 0.9 ** t.astype(float))


def in_official_order(tx):
    """The bias correction after the step, as in the authors' code."""
    return optax.chain(tx, optax.scale_by_schedule(lambda t: _correction(t + 1)))
