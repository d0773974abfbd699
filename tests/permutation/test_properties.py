"""What holds for every parameter, whatever its shape, dtype, partition and gradient."""

import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import support

import optperm

SHAPES = {"float16": (5, 4, 3), "bfloat16": (40, 2), "float32": (3, 3, 2, 4), "float64": (60,)}
SHAPES = {name: shape for name, shape in SHAPES.items() if name in support.DTYPES}


def numbers(seed, levels, broken):
    """Draw a parameter of each dtype and its recommendation: with ties, zeros of both signs, and with
    what is not finite in the recommendation, and in the first weight vector."""
    rng = np.random.default_rng(seed)
    params, grads = {}, {}
    for name, shape in SHAPES.items():
        weights, m = np.round(rng.normal(size=(2, *shape)) * levels) / levels
        weights = np.where(rng.random(shape) < 0.1, -0.0, weights)
        m[rng.random(shape) < 0.2] = 0.0
        if broken:
            m[rng.random(shape) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
            weights.reshape(-1, shape[-1])[:1, 0] = rng.choice([np.nan, np.inf])
        dtype = support.DTYPES[name]
        params[name], grads[name] = weights.astype(dtype), m.astype(dtype)
    return params, grads


@jax.jit
def step(params, grads, arguments):
    """One step, compiled for all dtypes and numbers at once."""
    tx = optperm.permute_by_cycles(**arguments)
    before = tx.init(params)
    updates, after = tx.update(grads, before, params)
    return updates, optperm.apply_updates(params, updates, after), before, after


# Aggressiveness, partition ratio and least size of a subset; levels of the numbers; broken ones.
CASES = [
    (0.3, 1.0, 1, 8, False),
    (1.5, 0.4, 2, 2, True),
    (0.0, 1.0, 12, 1e3, True),
    (0.5, 0.0, 1, 8, False),
    (0.5, 0.0, 12, 8, True),
]


def test_move_of_any_parameter_permutes_along_the_recommendation():
    """Each weight vector keeps its bits; each moved weight moved the way asked."""
    for seed, (alpha, ratio, least, levels, broken) in enumerate(CASES):
        params, grads = numbers(seed, levels, broken)
        arguments = {"aggressiveness": alpha, "partition_ratio": ratio, "key": seed}
        with jax.enable_x64(True):
            outputs = step(params, grads, arguments | {"min_partition_size": least})
            updates, placed, before, after = jax.device_get(outputs)
        assert support.signature(updates) == support.signature(placed) == support.signature(params)
        support.assert_same_bits(placed, after.weights)
        support.assert_permutes(placed, params)
        count = 0
        for name in SHAPES:
            trees = params, grads, placed, before.ranks, after.ranks
            w, m, new, ranks, new_ranks = (support.columns(tree[name]) for tree in trees)
            moved = ranks != new_ranks
            count += np.sum(moved)
            # What did not move kept its very bits, what sits out did not move.
            np.testing.assert_array_equal(*(support.as_integers(each[~moved]) for each in (new, w)))
            fit = np.isfinite(m) & (m != 0) & np.isfinite(w)
            assert not np.any(moved & ~fit)
            with np.errstate(invalid="ignore"):  # NumPy 2.0 warns of comparisons with NaN
                rises, falls = moved & (m < 0), moved & (m > 0)
            assert np.all(w[rises] <= new[rises])
            assert np.all(new[falls] < w[falls])
            size = max(least, int(np.floor(np.float32(ratio) * np.float32(len(w)))))
            assert size != 1 or not np.any(moved)
        np.testing.assert_allclose(
            after.fraction_moved, count / sum(p.size for p in params.values()), rtol=1e-6
        )
        assert least == 1 or count > 20


def test_training_of_every_dtype_keeps_each_weight_vector():
    """After twenty steps of sgperm the multisets of bits are those of the start, and in the state."""
    params, _ = numbers(0, 1e3, broken=False)
    tx = optperm.sgperm(0.3, partition_ratio=0.7)
    with jax.enable_x64(True):
        grads = [numbers(seed, 1e3, broken=False)[1] for seed in range(1, 21)]
        final, opt_state = loops.train(tx, params, grads, init="jit")[-1]
    support.assert_permutes(final, params)
    support.assert_same_bits(final, optperm.permutation.permuted_params(opt_state))
    for name, start in params.items():
        assert np.mean(np.asarray(final[name]) != start) > 0.3


@pytest.mark.filterwarnings("ignore:In .*all weights that enter an output unit are equal")
def test_ties_move_only_where_a_weight_changes():
    """A row of 0.0 and -0.0 has no range, so that no zero changes its sign; and of two equal weights
    that should fall and one larger that should rise nothing can move."""
    for values, pulls in (
        ([0.0, -0.0, 0.0, -0.0, -0.0], [1.0, -1.0, 1.0, -1.0, 1.0]),
        ([1.0, 1.0, 2.0], [1.0, 1.0, -1.0]),
    ):
        params, tx = jnp.array(values), optperm.sgperm(10.0)
        _, opt_state = tx.update(jnp.array(pulls), tx.init(params), params)
        support.assert_same_bits(optperm.permutation.permuted_params(opt_state), params)


def test_rows_in_the_thousands_of_bfloat16_are_permuted():
    """Bfloat16 has few values, so that long rows are full of ties: multisets still hold."""
    params, grads = support.normal((2, 1500, 2), 0, jnp.bfloat16)
    after, opt_state = loops.train(optperm.sgperm(0.1, partition_ratio=0.2), params, [grads])[0]
    support.assert_permutes(after, params)
    assert opt_state[1].fraction_moved > 0.5
