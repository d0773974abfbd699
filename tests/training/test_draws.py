"""Methods that take gradients at a draw of the params, in `fit` and in `with_loss`."""

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fitting import DATA, EVALUATION, linear_loss

import optperm
from optperm.core.remainders import join
from optperm.core.states import DRAW_STREAM, draw_params

pytestmark = pytest.mark.usefixtures("unchecked")


def ivon(**options):
    return optperm.ivon(0.1, 100.0, hess_init=1.0, b2=0.9, **options)


def train(tx, params=None, **options):
    return fitting.linear_fit(tx=tx, params=params, epochs=2, key=3, opt_state=None, **options)


def by_hand(tx, params, replicas, depth):
    """Params, state and losses after two epochs of draws by `sample_params`; means over replicas."""
    opt_state, losses = jax.jit(tx.init)(params), []
    of_draws = jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), DRAW_STREAM)

    def one(params, opt_state, batch, index, key):
        own = key if replicas == 1 else jax.random.fold_in(key, index)
        for _ in range(depth):  # the first state, in each of the states around it
            own = jax.random.fold_in(own, 0)
        draw = optperm.bayes.sample_params(opt_state, params, own)
        loss, grads = jax.value_and_grad(linear_loss)(draw, batch)
        updates, opt_state = tx.update(grads, opt_state, params, draw=draw)
        return optperm.apply_updates(params, updates, opt_state), opt_state, loss

    mapped = jax.jit(jax.vmap(one, in_axes=(None, None, 0, 0, None), axis_name="replica"))
    for step, batch in enumerate(fitting.all_batches(2, key=3, replicas=(replicas,))):
        key = jax.random.fold_in(of_draws, step)
        every = mapped(params, opt_state, batch, np.arange(replicas), key)
        params, opt_state = jax.tree.map(lambda leaf: leaf[0], every[:2])
        losses.append(np.mean(every[2]))
    return params, opt_state, np.array(losses)


@pytest.mark.parametrize(
    ("replicas", "dtype"),
    [
        (2, jnp.bfloat16),
        pytest.param(1, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param(4, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_fit_takes_each_gradient_at_a_draw_of_its_own(replicas, dtype):
    """Each replica draws with its own key, around 16-bit params with remainders; losses are at draws."""
    mapped, params = replicas > 1, fitting.linear_params(dtype)
    tx = ivon(axis_name="replica" if mapped else None)
    result = train(tx, params, **fitting.on(replicas, mapped=True) if mapped else {})
    depth = 1 if dtype == jnp.float32 else 2
    params, opt_state, losses = by_hand(tx, params, replicas, depth)
    np.testing.assert_allclose(result.history.steps["loss"], losses, rtol=1e-4)
    trained, states = (result.state.params, params), (result.state.opt_state, opt_state)
    if depth == 2:
        pairs = zip(trained, states, strict=True)
        trained = [jax.tree.map(join, p, state.remainder) for p, state in pairs]
        states = [state.inner for state in states]
    np.testing.assert_allclose(*(each["w"] for each in trained), rtol=1e-4, atol=1e-5)
    hessian, by_hands = (np.asarray(state.hessian["w"]) for state in states)
    np.testing.assert_allclose(hessian, by_hands, rtol=1e-3)
    assert np.abs(hessian - 1.0).max() > 0.1  # it has learned from the draws
    at_mean = train(optax.sgd(0.1)).history.steps["loss"]
    assert np.abs(losses - at_mean).max() > 1e-2


def test_evaluations_and_the_best_state_are_of_the_mean():
    rows = {}
    note = {"on_epoch_end": lambda event: rows.update({event.step: event.state.params})}
    result = train(ivon(), keep_best="eval_loss", **note, **EVALUATION)
    for step, value in zip(*(result.history.epochs[k] for k in ("step", "eval_loss")), strict=True):
        np.testing.assert_allclose(linear_loss(rows[step], DATA), value, rtol=1e-6)
    np.testing.assert_array_equal(result.best_state.params["w"], rows[result.best_step]["w"])


def test_only_the_phase_that_is_running_draws():
    """Each draw of a partition is of its own part; a sampler of 16 bits and SWAG draw nothing."""
    params, key = {"a": jnp.ones(50), "b": jnp.ones(50)}, jax.random.key(0)

    def first_draw(tx, params):
        return jax.jit(lambda params: draw_params(tx.init(params), params, key))(params)

    for tx in (optperm.sgld(1e-3, 10), optperm.swag(every=1), optax.adam(0.1)):
        half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        assert first_draw(tx, half) is None
    parts = optax.partition({"a": ivon(), "b": optax.sgd(0.1)}, {"a": "a", "b": "b"})
    draw = first_draw(parts, params)
    assert np.all(draw["a"] != 1)
    assert np.all(draw["b"] == 1)
    both = optax.partition({"a": ivon(), "b": ivon()}, {"a": "a", "b": "b"})
    draw = first_draw(both, params)
    assert np.all(draw["a"] != 1)
    assert np.all((draw["b"] != 1) & (draw["b"] != draw["a"]))
    tx = optperm.switch_after(2, optax.sgd(0.1), ivon())
    start = jax.jit(tx.init)(params)
    for switched in (False, True):
        draw = jax.jit(draw_params)(start._replace(switched=jnp.array(switched)), params, key)
        assert np.all((draw["a"] != 1) == switched)
    with pytest.raises(ValueError, match="mix the gradients of several draws"):
        first_draw(optax.MultiSteps(ivon(), 2), params)


def test_several_draws_or_an_axis_that_the_method_lacks_are_refused():
    with pytest.raises(ValueError, match=r"need a leading axis of 2 draws: .*mc_samples=1"):
        train(ivon(mc_samples=2))
    with pytest.raises(ValueError, match="differ after a step: pass axis_name='replica' to the"):
        train(ivon(), **fitting.on(4, mapped=True))
