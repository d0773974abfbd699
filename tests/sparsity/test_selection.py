"""Exact counts, sparsities and structures: against NumPy's stable sort, fractions and closed forms."""

import functools
import math
from fractions import Fraction

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import replicas
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.sparsity._choice import keep_highest, nearest_count, order_codes

LENET = {
    "in": jax.ShapeDtypeStruct((784, 300), jnp.float32),
    "mid": jax.ShapeDtypeStruct((300, 100), jnp.float32),
    "out": jax.ShapeDtypeStruct((100, 10), jnp.float32),
    "bias": jax.ShapeDtypeStruct((300,), jnp.float32),
}


def highest(scores, count):
    """Whether each is among the highest, by NumPy: of equal ones the first, NaN before all."""
    flat = np.asarray(scores, np.float64).ravel() + 0.0  # -0 is 0
    order = np.lexsort((np.arange(flat.size), -flat, ~np.isnan(flat)))
    kept = np.zeros(flat.size, bool)
    kept[order[:count]] = True
    return kept.reshape(np.shape(scores))


NUMBERS = np.float32([0.0, -0.0, 1e-45, -1e-45, 1.5, -1.5, 3e38, np.inf, -np.inf, np.nan, -np.nan])
SHAPES = ((3, 2), (7,), (2, 0), ())


@functools.partial(jax.jit, static_argnums=2)
def select(scores, counts, groups):
    codes = [order_codes(score) for score in scores]
    return keep_highest(codes, groups, list(counts))


@hypothesis.settings(max_examples=40)
@hypothesis.given(data=st.data())
def test_exactly_the_highest_are_kept(data):
    """Ties, zeros of both signs, infinities, NaN, subnormal numbers; leaves alone and together."""
    scores = [
        NUMBERS[data.draw(st.lists(st.integers(0, 10), min_size=n, max_size=n))].reshape(shape)
        for shape in SHAPES
        for n in [math.prod(shape)]
    ]
    counts = np.int32([data.draw(st.integers(0, size)) for size in (7, 7)])
    got = select(scores, counts, ((0, 3), (1,)))
    joined = highest(np.concatenate([scores[0].ravel(), scores[3].ravel()]), counts[0])
    np.testing.assert_array_equal(np.concatenate([got[0].ravel(), got[3].ravel()]), joined)
    np.testing.assert_array_equal(got[1], highest(scores[1], counts[1]))
    assert got[2].shape == (2, 0)


def test_a_choice_ignores_scale_follows_an_order_and_takes_in_smaller_ones():
    """For scores without ties: by a positive factor, a permutation, and rising fractions."""
    rng = np.random.default_rng(3)
    scores, order = rng.normal(size=97).astype(np.float32), rng.permutation(97)
    before = np.zeros(97, bool)
    for count in np.int32([[10], [40], [90]]):
        kept, scaled, permuted = (
            np.asarray(select([each], count, ((0,),))[0])
            for each in (scores, scores * np.float32(2**-7), scores[order])
        )
        np.testing.assert_array_equal(scaled, kept)
        np.testing.assert_array_equal(permuted, kept[order])
        assert (before <= kept).all()
        before = kept


@pytest.mark.parametrize("scope", ["leaf", "global"])
def test_loops_over_many_small_leaves_are_not_compiled_as_one_function(scope):
    """XLA on a CPU would, and take minutes: the time grows with the square of the leaves."""
    codes = [jax.ShapeDtypeStruct((8, 8), jnp.uint32)] * 12
    groups = [[*range(12)]] if scope == "global" else [[index] for index in range(12)]
    program = jax.jit(lambda codes: keep_highest(codes, groups, [5] * len(groups)))
    text = program.lower(codes).compile().as_text()
    assert text.count(" while(") == 2
    assert "small_call" not in text


def test_scores_of_64_and_16_bits():
    with jax.enable_x64(True):
        scores = 1 + np.arange(9.0) * 2.0**-50  # one number in float32
        np.testing.assert_array_equal(
            keep_highest([order_codes(jnp.asarray(scores))], [[0]], [4])[0], highest(scores, 4)
        )
    zeros = order_codes(jnp.array([-0.0, 0.0]))  # are equal
    assert keep_highest([zeros], [[0]], [1])[0].tolist() == [True, False]
    half = jnp.array([1.0, -2.0, 1.0, 0.5], jnp.bfloat16)
    assert keep_highest([order_codes(half)], [[0]], [1])[0].tolist() == [True, False, False, False]


def test_more_than_int32_can_count_is_refused():
    whole = jax.ShapeDtypeStruct((2**16, 2**15), jnp.uint32)
    with pytest.raises(ValueError, match=r"At most 2\*\*31 - 1 entries"):
        jax.eval_shape(lambda code: keep_highest([code], [[0]], [1]), whole)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_on_a_mesh_nothing_is_gathered(kind):
    """A leaf that is cut both ways has the mask of the whole one, cut as it is."""
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    scores = np.random.default_rng(0).normal(size=(16, 24)).round(1).astype(np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, NamedSharding(mesh, P("x", "y")))
        program = select.lower([placed], np.int32([100]), ((0,),)).compile()
        (got,) = program([placed], np.int32([100]))
        of_each_unit = jax.jit(lambda w: optperm.sparsity.keep_top(w, 0.5, scope="unit"))
        programs = program.as_text() + of_each_unit.lower(placed).compile().as_text()
    np.testing.assert_array_equal(got, highest(scores, 100))
    assert got.sharding.is_equivalent_to(placed.sharding, 2)
    names = {operation for operation, _, _ in replicas.collectives(programs)}
    assert names == {"all-reduce"}


def test_counts_are_the_nearest_from_python_and_from_jax():
    """.58 of 50 is 29 from both; ties go up; NaN is none; and no product of 55 bits is lost."""
    assert [nearest_count(s, 50) for s in (0.58, np.float32(0.58), 0.57, 0, 1)] == [
        29,
        29,
        29,
        0,
        50,
    ]
    assert nearest_count(0.5, 17) == 9
    rng = np.random.default_rng(0)
    fractions = np.float32([0.58, 0.5, 0.0, 1.0, 2**-25, 1 - 2**-24, *rng.uniform(size=40)])
    sizes = np.int32(
        [50, 17, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, *rng.integers(0, 2**31 - 1, 40)]
    )
    got = jax.jit(nearest_count)(jnp.asarray(fractions), jnp.asarray(sizes))
    exact = [
        math.floor(Fraction(round(Fraction(float(s)) * 2**24), 2**24) * int(n) + Fraction(1, 2))
        for s, n in zip(fractions, sizes, strict=True)
    ]
    assert got.tolist() == exact
    assert nearest_count(jnp.float32(np.nan), 5) == 0


@pytest.mark.parametrize("sparsity", [0.0, 0.01, 0.5, 0.9, 0.98, 0.999, 1.0])
def test_erk_shares_are_proportional_and_exact(sparsity):
    """Counts by water filling, exact in total; a traced fraction gives them within rounding."""
    fractions = optperm.sparsity.erk_sparsity(LENET, sparsity)
    live = {k: p.size - nearest_count(fractions[k], p.size) for k, p in LENET.items()}
    assert fractions["bias"] == 0.0
    assert sum(live.values()) - 300 == 266_200 - nearest_count(sparsity, 266_200)
    density = {k: (live[k] / LENET[k].size, sum(LENET[k].shape) / LENET[k].size) for k in live}
    cut = {k: d / r for k, (d, r) in density.items() if d < 1}
    for k, eps in cut.items():
        assert abs(eps - max(cut.values())) <= 2 / sum(LENET[k].shape)
    traced = jax.jit(lambda s: optperm.sparsity.erk_sparsity(LENET, s))(sparsity)
    for k, fraction in traced.items():
        assert abs(float(fraction) - fractions[k]) <= 2 / LENET[k].size
    if sparsity == 0.9:
        assert live == {"in": 18_714, "mid": 6_906, "out": 1_000, "bias": 300}


def test_erk_sparsity_without_matrices_is_zero():
    """Of a number and of an array alike."""
    params = {"bias": jax.ShapeDtypeStruct((3,), jnp.float32)}
    for sparsity in (0.5, jnp.float32(0.5)):
        assert optperm.sparsity.erk_sparsity(params, sparsity) == {"bias": 0.0}


def pruned(w, fraction, structure, **options):
    return np.asarray(
        optperm.sparsity.prune(
            w, optperm.mask_elements().init(w), fraction, structure=structure, **options
        )[0]
    )


def test_structures_against_numpy():
    """n of m along either axis, of equal ones the first; blocks with an edge; units by their mean."""
    w = np.random.default_rng(1).normal(size=(3, 8, 5)).astype(np.float32).round(1)
    got = pruned(w, None, optperm.sparsity.NOfM(2, 4)) != 0
    for i, j, k in np.ndindex(3, 2, 5):
        part = np.abs(w[i, 4 * j : 4 * j + 4, k])
        np.testing.assert_array_equal(got[i, 4 * j : 4 * j + 4, k], highest(part, 2) & (part != 0))
    last = pruned(w[..., :4], None, optperm.sparsity.NOfM(1, 2, axis=-1)) != 0
    assert (last.reshape(3, 8, 2, 2).sum(axis=-1) <= 1).all()

    got = pruned(w, 0.5, optperm.sparsity.Blocks(3, 2), scope="leaf")
    blocks = [
        (i, slice(3 * r, 3 * r + 3), slice(2 * c, 2 * c + 2)) for i, r, c in np.ndindex(3, 3, 3)
    ]
    means = np.float32([np.abs(w[block]).mean() for block in blocks])
    for block, is_kept in zip(blocks, highest(means, 27 - 14), strict=True):
        np.testing.assert_array_equal(got[block], w[block] * is_kept)

    for axis in (0, 1, -1):
        got = np.moveaxis(pruned(w, 0.4, optperm.sparsity.Units(axis)), axis, 0)
        rows = np.moveaxis(w, axis, 0)
        kept = highest(
            np.abs(rows).reshape(len(rows), -1).mean(axis=1),
            len(rows) - nearest_count(0.4, len(rows)),
        )
        np.testing.assert_array_equal(got, np.where(kept[:, None, None], rows, 0))


def test_a_share_of_what_enters_each_unit():
    """As Wanda compares: the same number of every column."""
    w = np.random.default_rng(2).normal(size=(2, 3, 4)).astype(np.float32)
    norms = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3, 1)
    got = pruned(w, 0.5, None, scope="unit", scores=np.abs(w) * norms).reshape(6, 4)
    for column, scores in zip(got.T, (np.abs(w) * norms).reshape(6, 4).T, strict=True):
        np.testing.assert_array_equal(column != 0, highest(scores, 3))


@pytest.mark.parametrize(
    ("error", "make", "arguments"),
    [
        (TypeError, optperm.sparsity.Blocks, (True, 2)),
        (ValueError, optperm.sparsity.Blocks, (0, 2)),
        (ValueError, optperm.sparsity.NOfM, (3, 2)),
        (TypeError, optperm.sparsity.NOfM, (1, 2, "x")),
        *((TypeError, optperm.sparsity.Units, (axis,)) for axis in ("a", 1.0, True)),
    ],
)
def test_structure_of_wrong_numbers_is_refused(error, make, arguments):
    with pytest.raises(error):
        make(*arguments)
