"""What holds for every parameter, whatever its shape, dtype, partition and gradient."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import support

import optperm


@st.composite
def steps(draw, max_entries=60):
    """A parameter of rank 1 to 5, recommendations for it, and how to partition it."""
    rank = draw(st.integers(1, 5))
    shape, room = [], max_entries
    for _ in range(rank):
        shape.append(draw(st.integers(1, max(1, min(room, 20 if rank < 3 else 4)))))
        room //= shape[-1]
    return {
        "shape": tuple(shape),
        "data": draw(st.integers(0, 2**32 - 1)),
        "levels": draw(st.sampled_from([0, 2, 8])),
        "zeros": draw(st.sampled_from([0.0, 0.3])),
        "broken": draw(st.sampled_from([0.0, 0.2])),
        "arguments": {
            "aggressiveness": draw(st.floats(0.0, 1.5)),
            "partition_ratio": draw(st.floats(0.0, 1.0)),
            "min_partition_size": draw(st.integers(1, 12)),
            "include_remainder": draw(st.booleans()),
            "seed": draw(st.integers(0, 2**31 - 1)),
        },
    }


def numbers(step, dtype):
    """The parameter and its recommendation."""
    rng = np.random.default_rng(step["data"])
    weights, recommendation = rng.normal(size=(2, *step["shape"]))
    if step["levels"]:
        weights = np.round(weights * step["levels"]) / step["levels"]
        recommendation = np.round(recommendation * step["levels"]) / step["levels"]
    weights = np.where(rng.random(weights.shape) < step["zeros"] / 2, -0.0, weights)
    recommendation[rng.random(weights.shape) < step["zeros"]] = 0.0
    broken = rng.random(weights.shape) < step["broken"]
    recommendation[broken] = rng.choice([np.nan, np.inf, -np.inf], size=weights.shape)[broken]
    return weights.astype(dtype), recommendation.astype(dtype)


@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
@pytest.mark.parametrize("dtype", support.DTYPES)
@hypothesis.given(step=steps())
@hypothesis.settings(max_examples=3)
def test_every_move_is_a_permutation_along_the_recommendation(dtype, step):
    """Each weight vector keeps its bits; each moved weight moved the way asked, within reach."""
    weights, recommendation = numbers(step, support.DTYPES[dtype])
    with jax.enable_x64(dtype == "float64"):
        params, grads = jnp.asarray(weights), jnp.asarray(recommendation)
        tx = optperm.permute_by_cycles(**step["arguments"])

        @jax.jit
        def run(params, grads):
            before = tx.init(params)
            updates, after = tx.update(grads, before, params)
            return updates, optperm.apply_updates(params, updates, after), before, after

        updates, placed, before, after = run(params, grads)

    assert params.dtype == updates.dtype == placed.dtype == weights.dtype
    support.assert_same_bits(placed, after.weights)
    support.assert_permutes(placed, params)

    w, m, new = (support.columns(x).astype(np.float64) for x in (weights, recommendation, placed))
    moved = support.columns(after.ranks) != support.columns(before.ranks)
    np.testing.assert_allclose(after.share_moved, np.mean(moved), rtol=1e-6)
    # What did not move kept its very bits, and what has no finite, nonzero recommendation did not.
    np.testing.assert_array_equal(
        support.as_integers(support.columns(placed))[~moved],
        support.as_integers(support.columns(weights))[~moved],
    )
    assert not np.any(moved & ~(np.isfinite(m) & (m != 0)))
    # With subsets of at least two entries epsilon is at most A (alpha + 1/2); with whole rows it is
    # A (alpha + 1/s), s the entries with a finite, nonzero recommendation.
    n = len(w)
    ratio, least = step["arguments"]["partition_ratio"], step["arguments"]["min_partition_size"]
    size = max(least, int(np.floor(np.float32(ratio) * np.float32(n))))
    s = np.sum(np.isfinite(m) & (m != 0), axis=0) if size >= n else 2
    alpha = np.float64(np.float32(step["arguments"]["aggressiveness"]))
    epsilon = np.broadcast_to(np.ptp(w, axis=0) * (alpha + 1.0 / np.maximum(s, 2)), w.shape)
    rises, falls = moved & (m < 0), moved & (m > 0)
    assert np.all((w <= new)[rises])
    assert np.all((new < w + epsilon)[rises])
    assert np.all((new < w)[falls])
    assert np.all((w - epsilon <= new)[falls])
    if size >= n:
        assert not np.any(moved[:, np.atleast_1d(s < 2)])
    if size == 1:
        assert not np.any(moved)


@pytest.mark.parametrize("dtype", support.every_night(support.DTYPES, ["bfloat16", "float32"]))
def test_training_keeps_every_weight_vector_bit_for_bit(dtype):
    """After twenty steps of sgperm the multisets, and the dtypes, are those of the start."""

    @jax.jit
    def train(seed, ratio):
        key = jax.random.key(seed)
        shapes = {"conv": jnp.zeros((3, 3, 2, 4), dtype), "bias": jnp.zeros(9, dtype)}
        params = support.random_like_from_key(shapes, key)
        tx = optperm.sgperm(0.3, partition_ratio=ratio, seed=seed)
        step = loops.make_step(tx, lambda p, key: (support.random_like_from_key(p, key), {}))
        return params, loops.carry(step, params, tx.init(params), jax.random.split(key, 20))

    with jax.enable_x64(dtype == "float64"):
        for seed, ratio in enumerate([0.1, 0.4, 0.7, 1.0]):
            params, (final, opt_state) = train(seed, ratio)
            support.assert_permutes(final, params)
            support.assert_same_bits(final, optperm.permuted_params(opt_state))
            assert np.mean(np.asarray(final["conv"] != params["conv"])) > 0.3


@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
def test_equal_weights_keep_their_places_and_their_signs():
    """A row of 0.0 and -0.0 has no range: nothing moves, and no zero changes its sign."""
    params = jnp.array([0.0, -0.0, 0.0, -0.0, -0.0])
    grads = jnp.array([1.0, -1.0, 1.0, -1.0, 1.0])
    ((after, opt_state),) = loops.train(optperm.sgperm(1.0), params, [grads], init="jit")
    support.assert_permutes(after, params)
    np.testing.assert_array_equal(optperm.permuted_params(opt_state), jnp.zeros(5))


def test_a_faller_never_takes_a_tied_weight():
    """Of two equal weights that should fall and one larger that should rise, nothing can move."""
    params = jnp.array([1.0, 1.0, 2.0])
    tx = optperm.sgperm(10.0)
    _, opt_state = jax.jit(tx.update)(jnp.array([1.0, 1.0, -1.0]), jax.jit(tx.init)(params), params)
    assert opt_state[1].share_moved == 0.0


def test_rows_in_the_thousands_match_in_low_precision():
    """Bfloat16 has few values, so that long rows are full of ties: multisets still hold."""
    params = support.normal((1500, 2), 0, jnp.bfloat16)
    grads = support.normal((1500, 2), 1, jnp.bfloat16)
    tx = optperm.sgperm(0.1, partition_ratio=0.2)
    _, opt_state = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)
    support.assert_permutes(optperm.permuted_params(opt_state), params)
    assert opt_state[1].share_moved > 0.5


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_weight_that_is_not_finite_stays_in_its_place(dtype):
    """NaN and infinite weights never move and do no harm: the finite ones around them do move."""
    odd = jnp.array([jnp.nan, jnp.inf, -jnp.inf, jnp.nan], dtype)
    params = support.normal((30, 2), 0, dtype).at[3:7, 0].set(odd)
    grads = support.normal((30, 2), 1, dtype)
    tx = optperm.permute_by_cycles(0.5, 1.0)
    _, opt_state = jax.jit(tx.update)(grads, jax.jit(tx.init)(params), params)
    after, before = np.asarray(opt_state.weights), np.asarray(params)
    np.testing.assert_array_equal(after[3:7, 0].astype(np.float32), odd.astype(jnp.float32))
    finite = np.isfinite(before)
    for column in range(2):
        support.assert_permutes(after[finite[:, column], column], before[finite[:, column], column])
    assert opt_state.share_moved > 0.5
