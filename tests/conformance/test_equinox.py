"""A whole Equinox model around every transformation: it trains as the same params in a dict do."""

from collections.abc import Callable

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm

START, BATCHES = support.random_params(), loops.linear_batches(4)


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

    def __call__(self, batch):
        params = {"kernel": self.kernel, "bias": self.bias}
        noise = 0.0 * jax.random.normal(self.key)
        rate = self.rate * jnp.where(self.calls > 0, 1.0, jnp.nan)
        return self.activation(loops.linear_loss(params, batch)) * rate + noise


REST = (jax.nn.identity, jnp.array(3), jax.random.key(1), 1.0, True, "model")
MODEL = Model(START["bias"], START["kernel"], *REST)
TRAINED = eqx.filter(MODEL, eqx.is_inexact_array)


def loss_of_model(model, batch):
    return model(batch)


@pytest.mark.spans("sgperm", "svrg")
@pytest.mark.usefixtures("lenient")
def test_a_whole_model_trains_as_its_params_do(ours):
    tx, model = ours.make(), MODEL
    opt_state = ours.prepared(tx.init(TRAINED), TRAINED)

    @eqx.filter_jit
    def step(model, opt_state, batch):
        e = optperm.evaluate(loss_of_model, model, batch)
        trained = eqx.filter(model, eqx.is_inexact_array)
        full = optperm.evaluate(loss_of_model, model, jnp.arange(5.0)).grad
        extra_args = {"full_grad_fn": lambda _: full, **e.extra_args}
        updates, opt_state = tx.update(e.grad, opt_state, trained, **extra_args)
        return optperm.apply_updates(model, updates, opt_state), opt_state

    for batch in BATCHES:
        model, opt_state = step(model, opt_state, batch)
    opt_state = ours.prepared(tx.init(START), START)
    params, _ = loops.train(tx, START, BATCHES, evaluate=loops.linear, opt_state=opt_state)[-1]
    for name, leaf in params.items():
        np.testing.assert_allclose(getattr(model, name), leaf, rtol=1e-5, atol=1e-6)
    assert eqx.tree_equal(model, Model(model.bias, model.kernel, *REST))
    if not ours.is_identity:
        assert any(np.any(params[name] != START[name]) for name in params)


def test_closures_take_the_whole_model_and_the_filtered_one():
    names = "value_fn", "grad_fn", "per_example_grad_fn", "example_grad_fn"

    @jax.jit
    def call_all():
        e, plain = (
            optperm.evaluate(loss, params, BATCHES[0], example=BATCHES[0][:1])
            for loss, params in ((loss_of_model, MODEL), (loops.linear_loss, START))
        )
        assert jax.tree.structure(e.grad) == jax.tree.structure(TRAINED)
        *found, expected = (
            jax.tree.leaves([e.value, [e.extra_args[name](params) for name in names]])
            for e, params in ((e, MODEL), (e, TRAINED), (plain, START))
        )
        return found, expected

    found, expected = call_all()
    for each in found:
        chex.assert_trees_all_close(each, expected, rtol=1e-5)


def test_floating_leaves_may_be_held_too():
    """By a filter of the user's, as Equinox freezes layers: None in the updates."""
    tx, grad = optax.sgd(0.1), optperm.evaluate(loss_of_model, MODEL, BATCHES[0]).grad
    frozen, trained = (eqx.tree_at(lambda m: m.kernel, each, None) for each in (grad, TRAINED))
    updates, opt_state = tx.update(frozen, tx.init(trained), trained)
    moved = optperm.apply_updates(MODEL, updates, opt_state)
    np.testing.assert_array_equal(moved.kernel, MODEL.kernel)
    np.testing.assert_allclose(moved.bias, MODEL.bias - 0.1 * grad.bias, rtol=1e-6)
