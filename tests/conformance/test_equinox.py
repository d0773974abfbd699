"""A whole Equinox model around every transformation: it trains as the same params in a dict do."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from transformations import TRANSFORMATIONS

import optperm

START = support.random_params()
BATCHES = [jnp.linspace(0.5, 1.5, 2) + index / 8 for index in range(4)]


class Model(eqx.Module):
    """The params, and what else a model may hold that is not trained."""

    bias: jax.Array
    kernel: jax.Array
    activation: Callable
    calls: jax.Array
    key: jax.Array
    rate: float
    is_trained: bool
    name: str
    missing: None = None

    def __call__(self, scale):
        noise = jax.random.normal(self.key, self.bias.shape)
        out = self.activation(self.kernel * scale).sum(axis=0) + (self.bias - noise) ** 2
        return jnp.sum(out) * self.rate * jnp.where(self.calls > 0, 1.0, jnp.nan)


def model_of(params):
    rest = (jnp.tanh, jnp.array(3), jax.random.key(1), 0.25, True, "model")
    return Model(params["bias"], params["kernel"], *rest)


def loss_of_model(model, batch):
    return jnp.mean(jax.vmap(model)(batch))


def loss_of_dict(params, batch):
    return loss_of_model(model_of(params), batch)


def step(tx, loss_fn, params, opt_state, batch):
    e = optperm.evaluate(loss_fn, params, batch)
    trained = eqx.filter(params, eqx.is_inexact_array)
    updates, opt_state = tx.update(e.grad, opt_state, trained, **e.extra_args)
    return optperm.apply_updates(params, updates, opt_state), opt_state, e.value


@pytest.mark.parametrize("ours", TRANSFORMATIONS, ids=str)
@pytest.mark.usefixtures("lenient")
def test_a_whole_model_trains_as_its_params_do(ours):
    tx, results = ours.make(), []
    for jit, loss_fn, params in (
        (jax.jit, loss_of_dict, START),
        (eqx.filter_jit, loss_of_model, model_of(START)),
    ):
        trained = eqx.filter(params, eqx.is_inexact_array)
        opt_state = ours.prepared(tx.init(trained), trained)
        carry, compiled = (params, opt_state), jit(functools.partial(step, tx, loss_fn))
        for batch in BATCHES:
            *carry, value = compiled(*carry, batch)
        results.append((carry[0], value))
    (params, value), (model, other) = results
    np.testing.assert_allclose(other, value, rtol=1e-5)
    for name, leaf in params.items():
        np.testing.assert_allclose(getattr(model, name), leaf, rtol=1e-5, atol=1e-6)
    rest = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array, inverse=True))
    held = jax.tree.leaves(eqx.filter(model_of(START), eqx.is_inexact_array, inverse=True))
    assert int(rest.pop(1)) == int(held.pop(1))
    assert bool(rest.pop(1) == held.pop(1))
    assert rest == held  # the same function, number, flag and name
    if not ours.is_identity:
        assert any(np.any(params[name] != START[name]) for name in params)


def test_closures_take_the_whole_model_and_the_filtered_one():
    model = model_of(START)
    e = optperm.evaluate(loss_of_model, model, BATCHES[0], example=BATCHES[0][:1])
    trained = eqx.filter(model, eqx.is_inexact_array)
    assert jax.tree.structure(e.grad) == jax.tree.structure(trained)
    plain = optperm.evaluate(loss_of_dict, START, BATCHES[0], example=BATCHES[0][:1])
    np.testing.assert_allclose(e.value, plain.value, rtol=1e-6)
    for name in ("value_fn", "grad_fn", "per_example_grad_fn", "example_grad_fn"):
        expected = jax.tree.leaves(plain.extra_args[name](START))
        for params in (model, trained):
            found = jax.tree.leaves(e.extra_args[name](params))
            support.assert_close(found, expected, rtol=1e-5)


def test_a_full_gradient_is_that_of_the_filtered_model():
    trained, rest = eqx.partition(model_of(START), eqx.is_inexact_array)

    def loss_fn(trained, batch):
        return loss_of_model(eqx.combine(trained, rest), batch)

    found = jax.tree.leaves(optperm.full_gradient(loss_fn, trained, BATCHES))
    expected = optperm.full_gradient(loss_of_dict, START, BATCHES)
    support.assert_close(found, jax.tree.leaves(expected), rtol=1e-5)


def test_floating_leaves_may_be_held_too():
    """By a filter of the user's, as Equinox freezes layers: None in the updates."""
    model, tx = model_of(START), optax.sgd(0.1)
    e = optperm.evaluate(loss_of_model, model, BATCHES[0])
    frozen = eqx.tree_at(lambda tree: tree.kernel, e.grad, None)
    trained = eqx.tree_at(lambda tree: tree.kernel, eqx.filter(model, eqx.is_inexact_array), None)
    updates, opt_state = tx.update(frozen, tx.init(trained), trained)
    moved = optperm.apply_updates(model, updates, opt_state)
    np.testing.assert_array_equal(moved.kernel, model.kernel)
    np.testing.assert_allclose(moved.bias, model.bias - 0.1 * e.grad.bias, rtol=1e-6)
