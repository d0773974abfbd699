"""Exact counts, sparsities and structures: against NumPy's stable sort, fractions and closed forms."""

import functools
import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from stable_choice import highest

import optperm
from optperm.sparsity import Blocks, NOfM, Units, erk_sparsity, keep_top, prune
from optperm.sparsity._choice import keep_highest, nearest_count, order_codes

LENET = {
    "in": jax.ShapeDtypeStruct((784, 300), jnp.float32),
    "mid": jax.ShapeDtypeStruct((300, 100), jnp.float32),
    "out": jax.ShapeDtypeStruct((100, 10), jnp.float32),
    "bias": jax.ShapeDtypeStruct((300,), jnp.float32),
}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_codes_rise_with_signed_scores(dtype):
    """Both zeros are tied, subnormal numbers are apart from them, and NaN of any sign is the highest."""
    scores = [-np.inf, -3e38, -1.5, -1e-45, -0.0, 0.0, 1e-45, 1.5, 3e38, np.inf, np.nan, -np.nan]
    with jax.enable_x64(True):
        codes = np.asarray(order_codes(jnp.asarray(np.array(scores, dtype))))
    assert codes[0] > 0
    ranks = np.unique(codes, return_inverse=True)[1]
    assert ranks.tolist() == [0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 9, 9]


def test_loops_over_many_small_leaves_are_not_compiled_as_one_function():
    """XLA on a CPU would, and take minutes: the time grows with the square of the leaves."""
    codes = [jax.ShapeDtypeStruct((8, 8), jnp.uint32)] * 12
    program = jax.jit(lambda codes: keep_highest(codes, [[i] for i in range(12)], [5] * 12))
    text = program.lower(codes).compile().as_text()
    assert text.count(" while(") == 2
    assert "small_call" not in text


def test_more_entries_than_int32_can_count_are_refused():
    whole = jax.ShapeDtypeStruct((2**16, 2**15), jnp.uint32)
    with pytest.raises(ValueError, match=r"At most 2\*\*31 - 1 entries"):
        jax.eval_shape(lambda code: keep_highest([code], [[0]], [1]), whole)


@pytest.mark.parametrize(
    "kind", support.every_night((AxisType.Explicit, AxisType.Auto), [AxisType.Auto])
)
def test_sharded_leaf_is_not_gathered(kind):
    """A leaf that is cut both ways has the mask of the whole one, cut as it is."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    scores = np.random.default_rng(0).normal(size=(16, 24)).round(1).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, NamedSharding(mesh, P("x", "y")))
        select = jax.jit(lambda scores: keep_highest([order_codes(scores)], [[0]], [100]))
        program = select.lower(placed).compile()
        (got,) = program(placed)
        of_each_unit = jax.jit(lambda w: keep_top(w, 0.5, scope="unit"))
        programs = program.as_text() + of_each_unit.lower(placed).compile().as_text()
    np.testing.assert_array_equal(got, highest(scores, 100))
    assert got.sharding.is_equivalent_to(placed.sharding, 2)
    names = {operation for operation, _, _ in replicas.collectives(programs)}
    assert names == {"all-reduce"}


def test_counts_are_the_nearest_from_python_and_from_jax():
    """Give 29 for 0.58 of 50 from both; ties go up, NaN is none, and no product of 55 bits is lost."""
    counts = [nearest_count(s, 50) for s in (0.58, np.float32(0.58), 0.57, 0, 1)]
    assert counts == [29, 29, 29, 0, 50]
    assert nearest_count(0.5, 17) == 9
    rng, largest = np.random.default_rng(0), 2**31 - 1
    fractions = np.float32([0.58, 0.5, 0.0, 1.0, 2**-25, 1 - 2**-24, *rng.uniform(size=40)])
    sizes = np.int32([50, 17, *[largest] * 4, *rng.integers(0, largest, 40)])
    got = jax.jit(nearest_count)(jnp.asarray(fractions), jnp.asarray(sizes))
    exact = [
        math.floor(Fraction(round(Fraction(float(s)) * 2**24), 2**24) * int(n) + Fraction(1, 2))
        for s, n in zip(fractions, sizes, strict=True)
    ]
    assert got.tolist() == exact
    assert nearest_count(jnp.float32(np.nan), 5) == 0


traced_erk = jax.jit(functools.partial(erk_sparsity, LENET))


@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.5, 0.9, 0.98, 0.999, 1.0])
def test_erk_shares_are_proportional_and_exact(sparsity):
    """Fill by water, exactly in total, or within rounding if traced; what is no matrix stays dense."""
    fractions = erk_sparsity(LENET, sparsity)
    live = {k: p.size - nearest_count(fractions[k], p.size) for k, p in LENET.items()}
    assert fractions["bias"] == 0.0
    assert sum(live.values()) - 300 == 266_200 - nearest_count(sparsity, 266_200)
    density = {k: (live[k] / LENET[k].size, sum(LENET[k].shape) / LENET[k].size) for k in live}
    cut = {k: d / r for k, (d, r) in density.items() if d < 1}
    for k, eps in cut.items():
        assert abs(eps - max(cut.values())) <= 2 / sum(LENET[k].shape)
    for k, fraction in traced_erk(sparsity).items():
        assert abs(float(fraction) - fractions[k]) <= 2 / LENET[k].size
    if sparsity == 0.9:
        assert live == {"in": 18_714, "mid": 6_906, "out": 1_000, "bias": 300}
    for given in (sparsity, jnp.float32(sparsity)):
        alone = functools.partial(erk_sparsity, {"bias": LENET["bias"]}, given)
        if sparsity == 0:
            assert alone() == {"bias": 0.0}
        else:
            with pytest.raises(ValueError, match=r"no leaf is a kernel\. Pass include=True"):
                alone()


def pruned(w, fraction, structure, **options):
    choose = functools.partial(prune, sparsity=fraction, structure=structure, **options)
    return np.asarray(jax.jit(lambda w: choose(w, optperm.mask_elements().init(w))[0])(w))


def test_structures_keep_what_numpy_keeps():
    """Keep n of m along the last input axis, blocks with a smaller edge, units, and their inputs."""
    w = np.random.default_rng(1).normal(size=(3, 8, 5)).astype(np.float32).round(1)
    window = optperm.LeafAxes("kernel", (0, 1), 2)
    for leaf, structure, axes, groups, axis in (
        (w, NOfM(2, 4), window, (3, 2, 4, 5), 2),
        (w[..., :4], NOfM(1, 2), optperm.LeafAxes("kernel", (0, 2), 1), (3, 8, 2, 2), 3),
    ):
        kept = np.apply_along_axis(highest, axis, np.abs(leaf).reshape(groups), structure.n)
        got = pruned(leaf, None, structure, axes=axes)
        np.testing.assert_array_equal(got, leaf * kept.reshape(leaf.shape))

    # The matrix of inputs x outputs, and each copy of a matrix
    for axes, (rows, columns) in (
        (window, (24, 5)),
        (optperm.LeafAxes("kernel", 1, (2, 0)), (8, 15)),
    ):
        matrix = w.transpose(*axes.in_axis, *axes.out_axis).reshape(rows, columns)
        got = pruned(w, 0.5, Blocks(3, 2), scope="leaf", axes=axes)
        got = got.transpose(*axes.in_axis, *axes.out_axis).reshape(rows, columns)
        num_rows, num_columns = -(-rows // 3), -(-columns // 2)
        blocks = [
            (slice(3 * r, 3 * r + 3), slice(2 * c, 2 * c + 2))
            for r, c in np.ndindex(num_rows, num_columns)
        ]
        means = np.float32([np.abs(matrix[block]).mean() for block in blocks])
        live = len(blocks) - nearest_count(0.5, len(blocks))
        for block, is_kept in zip(blocks, highest(means, live), strict=True):
            np.testing.assert_array_equal(got[block], matrix[block] * is_kept)

    for axes, order in ((window, (2, 0, 1)), (optperm.LeafAxes("kernel", (1, 2), 0), (0, 1, 2))):
        got = pruned(w, 0.4, Units(), axes=axes).transpose(order)
        rows = w.transpose(order)
        means = np.abs(rows).reshape(len(rows), -1).mean(axis=1)
        kept = highest(means, len(rows) - nearest_count(0.4, len(rows)))
        np.testing.assert_array_equal(got, np.where(kept[:, None, None], rows, 0))

    # As Wanda does
    scores = np.abs(w) * np.arange(1.0, 9.0, dtype=np.float32)[:, None]
    kept = np.apply_along_axis(highest, 0, scores.reshape(24, 5), 12).reshape(w.shape)
    got = pruned(w, 0.5, None, scope="unit", scores=scores, axes=window)
    np.testing.assert_array_equal(got, w * kept)


def test_structure_of_wrong_numbers_is_refused():
    for error, make, arguments in (
        (ValueError, Blocks, (0, 2)),
        (ValueError, NOfM, (3, 2)),
        (TypeError, NOfM, (1, "x")),
        (TypeError, Blocks, (1.0, 2)),
    ):
        with pytest.raises(error):
            make(*arguments)
