"""The door: a method that is nothing but its algorithm gets its checks and its types from there."""

import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.core.transformation import transformation


def doubled_sums(**options):
    """Make a method with updates and sums in float32."""

    def update(g, sums, params, **_):
        sums = jax.tree.map(lambda s, g: s.astype(jnp.float32) + g, sums, g)
        return optax.tree.scale(2, sums), sums

    options |= {"method": "doubled_sums", "like": lambda sums: sums}
    return transformation(optax.tree.zeros_like, update, **options)


def careless():
    """Make a method whose results are weak and in float32."""

    def init(params):
        return {"sums": optax.tree.zeros_like(params), "count": jnp.full((), 0)}

    def update(g, state, params, **_):
        ones = jax.tree.map(lambda p: jnp.full(p.shape, 1.0), params)
        return ones, {"sums": ones, "count": jnp.full((), 1.0)}

    return transformation(init, update, method="careless", like=lambda state: state["sums"])


PARAMS = {"w": jnp.ones(3, jnp.bfloat16), "b": jnp.zeros([])}
GRADS = {"w": jnp.full(3, 0.5), "b": jnp.ones([])}


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit], ids=["eager", "jit"])
def test_results_have_the_types_of_what_came_in_and_are_strong(transform):
    for options, expected in (({}, PARAMS), ({"updates_like": "updates"}, GRADS)):
        tx = doubled_sums(**options)
        updates, sums = transform(tx.update)(GRADS, tx.init(PARAMS), PARAMS)
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, expected)
        chex.assert_trees_all_equal_shapes_and_dtypes(sums, PARAMS)
        chex.assert_trees_all_equal(updates, {"w": jnp.ones(3, updates["w"].dtype), "b": 2.0})
    state = careless().init(PARAMS)
    after = transform(careless().update)(GRADS, state, PARAMS)
    assert support.signature(after) == support.signature((PARAMS, state))
    assert not any(weak for _, _, weak in support.signature(state)[1])


def needy(part=None, **needs):
    """Make a method that returns the gradient at twice the params."""

    def update(g, state, params, *, grad_fn, **_):
        return grad_fn(2 * params, **part or {}), state

    return transformation(lambda _: (), update, method="needy", needs=needs)


def test_a_gradient_is_made_of_the_loss_where_that_alone_is_given():
    """Take `value_fn`, as loops for Optax's L-BFGS pass it, but a gradient before it."""
    tx, w = needy(grad_fn="the gradient"), jnp.array([1.0, 2.0])
    value_fn = lambda w: jnp.sum(w**3)  # noqa: E731
    updates, _ = jax.jit(lambda w: tx.update(w, (), w, value_fn=value_fn))(w)
    assert updates.tolist() == [12.0, 48.0]
    updates, _ = tx.update(w, (), w, value_fn=value_fn, grad_fn=lambda w: w)
    assert updates.tolist() == [2.0, 4.0]

    of_a_part = needy({"start": 0, "size": 1}, grad_fn="the gradient")
    message = r"needy needs .* grad_fn, which takes a part of the batch"
    with pytest.raises(ValueError, match=message):
        of_a_part.update(w, (), w, value_fn=value_fn)


def test_extra_arguments_that_are_missing_are_named_at_once():
    """Name those that cannot be made, and how to get them."""
    tx, w = needy(value="the loss", grad_fn="its gradient", example_grad_fn="of one"), jnp.ones(2)
    message = "needy needs the extra arguments value, the loss, and grad_fn, its gradient, and "
    for missing in ({}, {"value": None}):
        with pytest.raises(ValueError, match=rf"{message}example.*optperm\.evaluate\(.*with_loss"):
            tx.update(w, (), w, **missing)
    with pytest.raises(ValueError, match="arguments value, the loss, and example_grad_fn, of one:"):
        tx.update(w, (), w, value_fn=jnp.sum)


@pytest.mark.usefixtures("lenient")
def test_complex_params_are_refused_with_the_advice_that_works():
    """Train the parts as two real leaves."""
    params = {"w": np.complex64([1 + 2j, 3j]), "b": np.ones(1, np.float32)}
    message = r"complex64.*two real arrays.*split_real_and_imaginary\(tx\)"
    with pytest.raises(TypeError, match=message):
        optperm.mars().init(params)
    tx = optax.chain(optax.contrib.split_real_and_imaginary(optperm.mars()), optax.scale(-0.1))
    updates = jax.jit(lambda p: tx.update(p, tx.init(p), p)[0])(params)
    assert np.any(updates["w"])


def test_a_state_of_another_optimizer_is_refused(ours):
    """Say in one sentence what is needed and what came, before anything reads the state: the state of an
    optimizer of Optax, what is left of a chain, or a checkpoint that was restored without its types."""
    params, tx = support.random_params(), ours.make()
    own = jax.eval_shape(tx.init, params)
    foreign = {"a tuple": (), "a dict": {"count": np.zeros([])}, "a NoneType": None}
    foreign["ScaleByAdamState"] = optax.scale_by_adam().init(params)
    for name, other in foreign.items():
        # A method that is a chain has a tuple of states, whose length Optax checks.
        state = (other,) * len(own) if type(own) is tuple else other
        message = rf"^\w+ needs an? \w+, the state that its init makes, got {name}\.( .*)?$"
        with pytest.raises(ValueError, match=message):
            tx.update(params, state, params)


def test_a_state_to_convert_is_refused_with_the_way_to_convert_it():
    tx, state = optperm.quantize_state(optax.adam(0.1)), optperm.apollo(rank=1).init(PARAMS)
    message = r"got ApolloState, .*\. optperm\.memory\.quantize\(opt_state"
    with pytest.raises(ValueError, match=message):
        tx.update(PARAMS, state)


@pytest.mark.spans("sgperm", "mandt_sgd", "mask_elements")
@pytest.mark.filterwarnings("ignore:(low_rank|apollo) leaves .* alone")
def test_own_states_are_taken_from_wherever_they_come(ours):
    """Take copies of a map over the tree, of a pickle and of Flax's serialization."""
    params, tx = support.random_params(), ours.make()
    state = tx.init(params)
    dictionary = flax.serialization.to_state_dict(state)

    def step(state):
        grads, extra_args = loops.linear(params, loops.linear_batches(1)[0])
        return tx.update(grads, state, params, **extra_args)[1]

    for copy in (
        jax.tree.map(jnp.asarray, state),
        pickle.loads(pickle.dumps(state)),
        flax.serialization.from_state_dict(tx.init(params), dictionary),
    ):
        assert jax.tree.structure(jax.eval_shape(step, copy)) == jax.tree.structure(state)
