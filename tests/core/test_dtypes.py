"""Dtypes of sums, casts to the types of another tree, and checks that all leaves are finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like


@pytest.mark.usefixtures("x64")
def test_sums_over_leaves_are_as_wide_as_the_widest_of_them():
    cases = ((), jnp.float32), (("bfloat16",), jnp.float32), (("float64", "bfloat16"), jnp.float64)
    for dtypes, wide in cases:
        assert accumulation_dtype([jnp.zeros(1, dtype) for dtype in dtypes]) == wide


def test_cast_leaves_have_the_dtypes_and_shardings_of_others():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    numbers = np.arange(4, dtype=np.float32)
    whole, cut = (jax.device_put(numbers, NamedSharding(mesh, spec)) for spec in (P(), P("x")))
    found = jax.jit(cast_like)({"w": whole}, {"w": cut.astype(jnp.bfloat16)})["w"]
    assert (found.dtype, found.sharding.spec) == (jnp.bfloat16, P("x"))
    np.testing.assert_array_equal(found.astype(jnp.float32), numbers)


def test_numbers_whose_sum_overflows_are_finite():
    """Look at every entry of every leaf, and not at their sum."""
    largest = {"a": jnp.full(4, jnp.finfo(jnp.float32).max), "b": jnp.zeros(2, jnp.bfloat16)}
    assert all_finite(largest)
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        assert not all_finite(largest | {"b": largest["b"].at[1].set(bad)})
    assert all_finite({})


def test_finiteness_of_all_leaves_is_computed_once():
    """Count the lines of an optimized program that keeps leaves where all are finite."""

    @jax.jit
    def keep(tree):
        is_finite = all_finite(tree)
        return [jnp.where(is_finite, leaf, 0.0) for leaf in tree]

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 64
    few, many = (keep.lower(part).compile().as_text().count("\n") for part in (shapes[:8], shapes))
    # JAX below 0.12 drops the barrier: each kernel repeats the work, which grows with the square.
    assert many < (9 if jax.__version_info__ >= (0, 12) else 64) * few
