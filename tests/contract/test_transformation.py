"""The door: a method that is nothing but its algorithm gets its checks and its types from there."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import optperm
from optperm.contract.transformation import transformation


def doubled_sums():
    """Updates and sums in float32, whatever the params are."""

    def init(params):
        return jax.tree.map(jnp.zeros_like, params)

    def update(g, sums, params, **_):
        sums = jax.tree.map(lambda s, g: s.astype(jnp.float32) + g, sums, g)
        return jax.tree.map(lambda s: 2 * s, sums), sums

    needs = {"value": "the loss"}
    return transformation(init, update, method="doubled_sums", like=lambda s: s, needs=needs)


PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros([])}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones([])}


@pytest.mark.parametrize("jitted", [False, True])
def test_what_comes_out_has_the_types_of_what_came_in(jitted):
    tx = doubled_sums()
    update = jax.jit(tx.update) if jitted else tx.update
    updates, sums = update(GRADS, tx.init(PARAMS), PARAMS, value=0.0)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, sums, PARAMS)
    chex.assert_trees_all_equal(updates, jax.tree.map(lambda s: 2 * s, sums))


def test_an_extra_argument_that_is_missing_is_named():
    tx = doubled_sums()
    message = r"doubled_sums needs the extra argument value, the loss: e = optperm\.evaluate\("
    for missing in ({}, {"value": None}):
        with pytest.raises(ValueError, match=message):
            tx.update(GRADS, tx.init(PARAMS), PARAMS, **missing)


def needy(**needs):
    """Gives back the gradient at twice the params."""

    def update(g, state, params, *, grad_fn, **_):
        return grad_fn(jax.tree.map(lambda p: 2 * p, params)), state

    return transformation(lambda _: (), update, method="needy", needs=needs)


def test_a_gradient_is_made_of_the_loss_where_that_alone_is_given():
    """Loops written for Optax's L-BFGS pass `value_fn`; a gradient that is given is taken before it."""
    tx, w = needy(grad_fn="the gradient"), jnp.array([1.0, 2.0])
    value_fn = lambda w: jnp.sum(w**3)  # noqa: E731
    updates, _ = jax.jit(lambda w: tx.update(w, (), w, value_fn=value_fn))(w)
    assert updates.tolist() == [12.0, 48.0]
    updates, _ = tx.update(w, (), w, value_fn=value_fn, grad_fn=lambda w: w)
    assert updates.tolist() == [2.0, 4.0]

    def of_a_part(g, state, params, *, grad_fn, **_):
        return grad_fn(params, start=0, size=1), state

    tx = transformation(lambda _: (), of_a_part, method="parts", needs={"grad_fn": "the gradient"})
    with pytest.raises(
        ValueError, match=r"parts needs .* grad_fn, which takes a part of the batch"
    ):
        tx.update(w, (), w, value_fn=value_fn)


def test_all_extra_arguments_that_are_missing_are_named_at_once():
    """Also where one of them can be made."""
    tx, w = needy(value="the loss", grad_fn="its gradient", example_grad_fn="of one"), jnp.ones(2)
    message = (
        r"needs the extra arguments value, the loss, and grad_fn, its gradient, and example_grad_fn"
    )
    with pytest.raises(ValueError, match=message + r".*batch, example=one_example\).*with_loss"):
        tx.update(w, (), w)
    with pytest.raises(ValueError, match="arguments value, the loss, and example_grad_fn, of one:"):
        tx.update(w, (), w, value_fn=jnp.sum)


@pytest.mark.usefixtures("lenient")
def test_complex_params_get_the_advice_that_works():
    """The parts are trained as two real leaves."""
    params = {"w": jnp.array([1 + 2j, 3j]), "b": jnp.ones(1)}
    with pytest.raises(TypeError, match=r"complex64.*split_real_and_imaginary\(tx\)"):
        optperm.mars().init(params)
    tx = optax.chain(optax.contrib.split_real_and_imaginary(optperm.mars()), optax.scale(-0.1))
    updates, _ = tx.update(params, tx.init(params), params)
    assert optax.apply_updates(params, updates)["w"].tolist() != params["w"].tolist()
    with pytest.raises(TypeError, match=r"int32.*optax\.partition"):
        optperm.mars().init({"w": jnp.arange(2)})
