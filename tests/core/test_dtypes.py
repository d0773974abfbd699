"""Properties of all leaves of a tree, in programs whose size does not grow faster than the tree."""

import jax
import jax.numpy as jnp

from optperm.core.dtypes import all_finite


def count_lines(number):
    """The lines of an optimized program that keeps leaves where all are finite."""

    def keep(tree):
        is_finite = all_finite(tree)
        return [jnp.where(is_finite, leaf, 0.0) for leaf in tree]

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * number
    return jax.jit(keep).lower(shapes).compile().as_text().count("\n")


def test_finiteness_of_all_leaves_is_computed_once():
    few, many = count_lines(8), count_lines(64)
    # In each kernel anew it would grow by the square, as with JAX below 0.12, which drops the barrier.
    assert many < (9 if jax.__version_info__ >= (0, 12) else 64) * few
