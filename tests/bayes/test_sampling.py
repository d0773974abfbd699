"""Draws against a plain loop over the same keys, and what is made of them: names and predictions."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import scipy.special
import support

import optperm
from optperm.core import fresh_jit as compiling

KEY = jax.random.key(3)


def noisy_slope(params, key):
    """The gradient of a parabola, with unit noise."""
    noise = optax.tree.random_like(key, params)
    return jax.tree.map(lambda p, e: p + e.astype(p.dtype), params, noise), {}


OPTIMIZER = optax.sgd(0.1, momentum=0.5)
noisy_step = loops.make_step(OPTIMIZER, noisy_slope)


def start():
    params = {"w": jnp.array([1.0, -2.0]), "b": jnp.asarray(3.0, jnp.bfloat16)}
    return params, OPTIMIZER.init(params)


def draw(params, opt_state, **options):
    options = {"key": KEY, "num_chains": 3, "num_draws": 4} | options
    return optperm.bayes.draw_samples(noisy_step, params, opt_state, **options)


def samples_of(draws):
    return optperm.bayes.Samples(draws, (), (), jnp.int32(0), jnp.int32(1))


def assert_rounded_otherwise(actual, expected):
    """Asserts that numbers up to about 1 differ by no more than two programs may round them apart.

    Where a processor has no bfloat16, or a product is fused with a sum, XLA rounds at other places.
    """
    tolerance = float(jnp.finfo(jnp.bfloat16).eps) if actual.dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(
        np.asarray(actual, np.float32), np.asarray(expected, np.float32), atol=tolerance
    )


def test_as_a_plain_loop():
    """Every draw of every chain is an iterate, with the keys promised."""
    samples = draw(*start(), thinning=3, burn_in=5)
    step = jax.jit(noisy_step)
    for chain in range(3):
        params, opt_state = start()
        key, iterates = jax.random.fold_in(KEY, chain), []
        for t in range(5 + 4 * 3):
            params, opt_state = step(params, opt_state, jax.random.fold_in(key, t))
            iterates.append(jax.tree.map(lambda p: np.asarray(p, np.float32), params))
        for i in range(4):
            drawn = replicas.take(samples.params, (chain, i))
            jax.tree.map(assert_rounded_otherwise, drawn, iterates[5 + 3 * (i + 1) - 1])
        last = replicas.take((samples.last_params, samples.last_opt_state), chain)
        jax.tree.map(assert_rounded_otherwise, last, (params, opt_state))
    assert samples.next_step == 5 + 4 * 3
    dtypes, expected = (jax.tree.map(jnp.result_type, each) for each in (samples.params, params))
    assert dtypes == expected


@pytest.mark.slow
def test_two_parts_are_one_run():
    """A continued run gives the same bits as an uninterrupted run."""
    whole, first = (draw(*start(), num_draws=n, burn_in=3, thinning=2) for n in (6, 2))
    left = first.last_params, first.last_opt_state
    second = draw(*left, stacked=True, first_step=first.next_step, thinning=2)
    joined = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), first.params, second.params)
    support.assert_same_bits(joined, whole.params)
    support.assert_same_bits(second[1:5], whole[1:5])
    again = draw(*left, stacked=True, thinning=2)
    assert not np.array_equal(again.params["w"], second.params["w"])


def test_chains_differ_and_do_not_depend_on_their_number():
    """The keys of a chain do not depend on the other chains; raw key data and ints work too."""
    three, two = draw(*start()), draw(*start(), num_chains=2)
    support.assert_same_bits(jax.tree.map(lambda s: s[:2], three.params), two.params)
    assert len(np.unique(three.params["w"][:, -1, 0])) == 3
    for key in (jax.random.key_data(KEY), 3):
        support.assert_same_bits(draw(*start(), key=key), three)


@pytest.mark.slow
def test_a_step_is_compiled_once(monkeypatch):
    """Burn-in, draws and a later run share one compilation; inside jit the draws are the same."""
    traces, programs = [], {}
    monkeypatch.setattr(compiling, "_PROGRAMS", programs)

    def step(params, opt_state, key):
        traces.append(None)
        return noisy_step(params, opt_state, key)

    def run(key, **options):
        return optperm.bayes.draw_samples(step, *start(), key, num_chains=2, num_draws=3, **options)

    first = run(KEY, burn_in=2, thinning=2)
    assert (len(traces), len(programs)) == (1, 1)
    run(KEY, burn_in=7, thinning=1, first_step=100)
    assert (len(traces), len(programs)) == (2, 1)
    support.assert_same_bits(jax.jit(lambda key: run(key, burn_in=2, thinning=2))(KEY), first)


def sampler_step(tx):
    def step(w, state, key):
        updates, state = tx.update(w + jax.random.normal(key, w.shape), state, w)
        return w + updates, state

    return step


def test_chains_that_repeat_keys_are_warned_of():
    """If first_step is not given to a sampler that has taken steps; 0 says that the key is another."""
    tx, w = optperm.sgld(1e-3, 100), jnp.zeros(2)
    run = functools.partial(optperm.bayes.draw_samples, sampler_step(tx), num_chains=2, num_draws=3)
    samples = run(w, tx.init(w), 0)
    last = samples.last_params, samples.last_opt_state
    for first_step in (samples.next_step, 0):
        run(*last, 1, stacked=True, first_step=first_step)
    with pytest.warns(UserWarning, match="taken 3 steps, but first_step is not given"):
        run(*last, 0, stacked=True)


def test_states_restored_without_a_target_are_named():
    """As Orbax restores them: dicts and lists, with None for an empty tuple; no axis is confused."""
    tx, w = optax.chain(optperm.sgld(1e-3, 100), optax.identity()), jnp.zeros(2)
    step = sampler_step(tx)
    state = tx.init(w)
    restored = [state[0]._asdict(), None]
    with pytest.raises(ValueError, match=r"sgld needs an? SgldState.*restored without a target"):
        optperm.bayes.draw_samples(step, w, restored, 0, num_chains=2, num_draws=1)
    for params in ({}, ()):
        with pytest.raises(ValueError, match="params must contain arrays to sample"):
            optperm.bayes.draw_samples(step, params, (), 0, num_chains=2, num_draws=1)

    def with_none(w, state, key):
        w, inner = step(w, state["tx"], key)
        return w, {"none": None, "tx": inner}

    found, wanted = (
        optperm.bayes.draw_samples(*given, 0, num_chains=2, num_draws=4).params
        for given in ((with_none, w, {"none": None, "tx": state}), (step, w, state))
    )
    np.testing.assert_array_equal(found, wanted)


def test_names_of_the_draws():
    """Paths joined by dots, NumPy arrays that ArviZ takes, 16-bit floats widened."""
    tree = {
        "dense": {"kernel": jnp.ones((2, 5, 3, 4)), "bias": jnp.ones((2, 5, 4), jnp.bfloat16)},
        "scales": [jnp.ones((2, 5)), jnp.arange(10).reshape(2, 5)],
    }
    found = samples_of(tree).as_dict()
    assert {name: (a.shape, str(a.dtype)) for name, a in found.items()} == {
        "dense.kernel": ((2, 5, 3, 4), "float32"),
        "dense.bias": ((2, 5, 4), "float32"),
        "scales.0": ((2, 5), "float32"),
        "scales.1": ((2, 5), "int32"),
    }
    assert all(type(array) is np.ndarray for array in found.values())
    assert next(iter(samples_of(tree).as_dict(separator="/"))) == "dense/bias"
    assert list(samples_of(jnp.ones((2, 5))).as_dict()) == ["params"]
    for params, message in (
        ({"a": {"b": jnp.ones((2, 5))}, "a.b": jnp.ones((2, 5))}, r"Two leaves of params.*'a\.b'"),
        ({}, r"first two axes are \(chains, draws\)"),
        ({"a": jnp.ones((2, 5)), "b": jnp.ones(2)}, r"first two axes are \(chains, draws\)"),
    ):
        with pytest.raises(ValueError, match=message):
            samples_of(params).as_dict()


def test_prediction_is_the_mean_over_draws():
    """Of the probabilities, and not the prediction of the mean params."""
    rng = np.random.default_rng(0)
    x, draws = np.float32(rng.normal(size=(7, 4))), np.float32(rng.normal(size=(2, 5, 4, 3)))
    found = optperm.bayes.posterior_predictive(
        lambda w, x: jax.nn.softmax(x @ w), samples_of(jnp.asarray(draws)), x
    )
    each = scipy.special.softmax(x @ draws.reshape(10, 4, 3), axis=-1)
    np.testing.assert_allclose(found.draws.reshape(10, 7, 3), each, atol=1e-6)
    np.testing.assert_allclose(found.mean, np.mean(each, axis=0), atol=1e-6)
    np.testing.assert_allclose(found.deviation, np.std(each, axis=0), atol=1e-6)
    np.testing.assert_allclose(found.quantile(0.5), np.median(each, axis=0), atol=1e-6)
    of_mean = scipy.special.softmax(x @ draws.mean(axis=(0, 1)), axis=-1)
    assert np.abs(found.mean - of_mean).max() > 0.05


def predict(draws):
    """Predictions of models that are their own predictions."""
    return optperm.bayes.posterior_predictive(lambda w, x: w, optperm.bayes.Ensemble(draws), ())


def test_predictions_in_16_bits_are_added_up_in_32():
    """A mean over thousands of draws, where one draw would not change a sum in 16 bits."""
    found = predict(jnp.full(4000, 0.7, jnp.bfloat16)).mean
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, float(jnp.bfloat16(0.7)), rtol=1e-5)


def test_an_entropy_is_of_probabilities():
    """Logits, log-probabilities and sigmoids are refused; 16 bits may sum to one by their rounding."""
    p = np.float32(scipy.special.softmax(support.normal((3, 5, 4), seed=1), axis=-1))
    mean = np.asarray(p, np.float64).mean(axis=0)
    for draws, tolerance in ((p, 1e-5), (p.astype(support.DTYPES["bfloat16"]), 0.02)):
        found = predict(draws)
        expected = -(mean * np.log(mean)).sum(axis=-1)
        np.testing.assert_allclose(found.entropy(), expected, rtol=tolerance)
        assert np.all(np.asarray(found.mutual_information()) > 0)
    with_nan = np.where(np.arange(4) == 1, np.float32(np.nan), p)
    for draws in (5 * p, np.log(p), p[..., 0], p[..., :1], with_nan):
        moments = draws.mean(axis=0), draws.std(axis=0)
        found = optperm.bayes.Predictions(draws[None], *moments)
        for call in (found.entropy, found.mutual_information):
            with pytest.raises(ValueError, match=r"probabilities .*two classes|sum to one"):
                call()


def test_entropy_and_mutual_information_of_two_draws():
    """Sure draws that disagree have log 2 of both, draws that agree on 0.5 of the first alone."""
    draws = jnp.array([[[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]])
    found = predict(draws)
    read = jax.jit(lambda found: (found.entropy(), found.mutual_information()))
    entropy, information = read(found)
    np.testing.assert_allclose(entropy, np.log([2, 2]), rtol=1e-6)
    np.testing.assert_allclose(information, [np.log(2), 0.0], atol=1e-6)
    for params in (jnp.ones(()), {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}):
        with pytest.raises(ValueError, match="stacked along a leading axis"):
            predict(params)
