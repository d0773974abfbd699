"""Helpers that several test modules share."""

import importlib
import inspect
import itertools
import os
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import optperm
from optperm.permutation import _library as library

# The subpackages of methods. Their names are public, like the names at the top.
ROOMS = ("bayes", "distributed", "memory", "permutation", "sparsity", "subspace", "variance")
PUBLIC = {
    name: getattr(module, name)
    for module in (optperm, *(importlib.import_module(f"optperm.{room}") for room in ROOMS))
    for name in dir(module)
    if not name.startswith("_") and not inspect.ismodule(getattr(module, name))
}

# XLA cannot compile float16 where it is held to instructions that are older than F16C.
HAS_FLOAT16 = not re.search(r"xla_cpu_max_isa=(SSE4_2|AVX)\b", os.environ.get("XLA_FLAGS", ""))
needs_float16 = pytest.mark.skipif(
    not HAS_FLOAT16, reason="XLA cannot compile float16 for this processor"
)
FLOAT16 = pytest.param("float16", marks=needs_float16)
# NumPy's dtype of each that can be trained.
DTYPES = {
    **({"float16": np.float16} if HAS_FLOAT16 else {}),
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}


def in_turns(*factors):
    """Return all combinations of the values of some factors, for `pytest.mark.parametrize`.

    As many as the longest factor has values, in which each value occurs, are run every time; the others
    are marked `exhaustive`.
    """
    factors = [list(factor) for factor in factors]
    turns = max(map(len, factors))
    chosen = [tuple(each[turn % len(each)] for each in factors) for turn in range(turns)]
    return every_night(itertools.product(*factors), chosen)


def every_night(cells, usual, mark=pytest.mark.exhaustive, slow=()):
    """Mark those cells for `pytest.mark.parametrize` that are not usual, or slow."""

    def mark_of(cell):
        if cell in slow:
            return pytest.mark.slow
        return () if cell in usual else mark

    return [
        pytest.param(*(cell if isinstance(cell, tuple) else (cell,)), marks=mark_of(cell))
        for cell in cells
    ]


def require_kernel(name):
    """Fail a test whose kernel is missing, or skip it if OPTPERM_TEST_WITHOUT_KERNEL is set."""
    if name in library.available_kernels():
        return
    missing = f"the kernel {name!r} is not available here"
    if os.environ.get("OPTPERM_TEST_WITHOUT_KERNEL"):
        pytest.skip(f"{missing}, and OPTPERM_TEST_WITHOUT_KERNEL is set")
    pytest.fail(f"{missing}: build it, or set OPTPERM_TEST_WITHOUT_KERNEL")


def _pairs(actual, expected):
    """Yield the names and leaves of two trees, which have to agree in structure."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    named = jax.tree_util.tree_leaves_with_path(expected)
    for a, (path, b) in zip(jax.tree.leaves(actual), named, strict=True):
        yield jax.tree_util.keystr(path), a, b


def assert_same_bits(actual, expected):
    """Assert that two trees agree in structure, shapes, dtypes and every bit (0.0 is not -0.0)."""
    for name, *pair in _pairs(actual, expected):
        a, b = (np.asarray(leaf) for leaf in pair)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        assert a.tobytes() == b.tobytes(), f"{name}: {a} is not {b}"


def signature(tree):
    """Return the structure, shapes, dtypes and weak types of a tree."""
    avals = [(x.shape, x.dtype, jax.typeof(x).weak_type) for x in jax.tree.leaves(tree)]
    return jax.tree.structure(tree), avals


def columns(leaf):
    """Return a leaf as its weight vectors, one a column: the last axis indexes output units."""
    leaf = np.asarray(leaf)
    return leaf.reshape(-1, leaf.shape[-1]) if leaf.ndim > 1 else leaf.reshape(-1, 1)


def as_integers(array):
    """Return the bits of a floating array as unsigned integers of the same width."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def assert_permutes(after, before):
    """Assert that each weight vector of `after` holds the bits of `before`, in any order."""

    def compare(after, before):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        sets = (np.sort(as_integers(columns(leaf)), axis=0) for leaf in (after, before))
        np.testing.assert_array_equal(*sets)

    jax.tree.map(compare, after, before)


def normal(shape, seed=0, dtype=np.float32):
    """Return normal numbers by NumPy: a program of JAX would be compiled for each shape.

    `jnp.asarray` compiles a program for each shape as well, and `jax.device_put` compiles nothing.
    """
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def bias(size, seed=0):
    return normal((size,), seed)


def random_params(seed=0, dtype=np.float32):
    """Return a small network's parameters, without ties."""
    flat = np.random.default_rng(seed).normal(size=65).astype(dtype)
    return jax.device_put({"kernel": flat[:60].reshape(12, 5), "bias": flat[60:]})


def random_like(params, seed):
    """Return a tree of normal numbers like params, from an integer."""
    rng = np.random.default_rng((seed, 1))  # others than `random_params` has
    return jax.tree.map(
        lambda p: jax.device_put(rng.normal(size=jnp.shape(p)).astype(jnp.result_type(p))), params
    )
