"""SWAG's mean and covariance against NumPy, and the law of its draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import optperm


@functools.cache
def collected(rank):
    """What SWAG collected of a random walk, how far that was from the mean so far, and its state."""
    walk = 1e3 + np.cumsum(np.random.default_rng(0).normal(size=(25, 4)), axis=0)
    tx = optax.chain(optax.sgd(0.1), optperm.swag(3, rank=rank, start=2))
    params = [{"a": jnp.array(w[:1]), "b": jnp.array(w[1:].reshape(1, 3))} for w in walk]
    state, update = tx.init(params[0]), jax.jit(tx.update)
    for p in params:
        _, state = update(p, state, p)
    seen = walk[2::3].astype(np.float32).astype(np.float64)
    return seen, seen - np.cumsum(seen, axis=0) / np.arange(1, len(seen) + 1)[:, None], state


def rows(tree, size=1):
    """Trees that are stacked, as rows."""
    return np.concatenate([np.reshape(leaf, (size, -1)) for leaf in jax.tree.leaves(tree)], axis=1)


def test_mean_variance_and_deviations_are_those_of_numpy():
    seen, deviations, state = collected(rank=3)
    mean = rows(optperm.bayes.posterior_mean(state))[0]
    np.testing.assert_allclose(mean, seen.mean(axis=0), rtol=1e-6)
    variances = rows(state[1].squares)[0] / len(seen)
    np.testing.assert_allclose(variances, seen.var(axis=0), rtol=2e-3)  # |theta| is 1e3
    found = rows(state[1].deviations, 3)
    for i in range(len(seen) - 3, len(seen)):
        np.testing.assert_allclose(found[i % 3], deviations[i], atol=2e-3)


@pytest.mark.parametrize("rank", [0, 3])
def test_draws_have_the_covariance_of_the_paper(rank):
    seen, deviations, state = collected(rank)
    draw = jax.jit(functools.partial(optperm.bayes.sample_params, num_draws=40_000))
    draws = rows(draw(state, optperm.bayes.posterior_mean(state), jax.random.key(0)), 40_000)
    expected = np.diag(seen.var(axis=0))
    if rank:
        last = deviations[-rank:]
        expected = expected / 2 + last.T @ last / (2 * (rank - 1))
    np.testing.assert_allclose(draws.mean(axis=0), seen.mean(axis=0), atol=0.15)
    np.testing.assert_allclose(np.cov(draws.T), expected, atol=0.03 * np.abs(expected).max())


@pytest.mark.slow
def test_draws_for_params_of_16_bits_are_not_rounded():
    """Two models one unit of bfloat16 apart: the draws' spread is half a unit."""
    tx, w = optperm.swag(1, rank=0), jnp.ones(2000, jnp.bfloat16)
    state = tx.init(w)
    for distance in (0.0, 2**-7):
        _, state = tx.update(w, state, (w + distance).astype(jnp.bfloat16))
    draws = optperm.bayes.sample_params(state, w, jax.random.key(0), num_draws=10)
    assert draws.dtype == jnp.float32
    np.testing.assert_allclose(draws.std(), 2**-8, rtol=0.03)


def test_draws_before_the_first_collection_are_refused_and_nan_where_they_are_traced():
    m = jnp.ones(3)
    state = optperm.swag(1, rank=2).init(m)
    draw = functools.partial(optperm.bayes.sample_params, params=m, key=0)
    for read in (draw, optperm.bayes.posterior_mean):
        with pytest.raises(ValueError, match="collected no params"):
            read(state)
        assert np.isnan(jax.jit(read)(state)).all()


@pytest.mark.slow
def test_state_of_models_side_by_side_is_read_under_vmap():
    """As `jax.vmap` trained it; read as one model, the error says so."""
    tx, w = optperm.swag(1, rank=2), jnp.arange(6.0).reshape(3, 2)
    state = jax.vmap(tx.init)(w)
    ivon = jax.vmap(optperm.ivon(0.1, num_data=10.0).init)(w)
    draw = functools.partial(optperm.bayes.sample_params, params=w, key=jax.random.key(0))
    for read, one in ((optperm.bayes.posterior_mean, state), (draw, state), (draw, ivon)):
        with pytest.raises(ValueError, match=r"axis of models: call this function under jax\.vmap"):
            read(one)
    _, state = jax.vmap(tx.update)(w, state, w)
    np.testing.assert_array_equal(jax.vmap(optperm.bayes.posterior_mean)(state), w)


def test_state_with_another_rank_is_refused():
    state = optperm.swag(1, rank=4).init(jnp.zeros(2))
    with pytest.raises(ValueError, match="another rank="):
        optperm.swag(1, rank=3).update(jnp.zeros(2), state, jnp.zeros(2))
