"""Orthonormal bases of a small part of a matrix's columns' space: (..., d, r) for G, (..., d, k)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from optperm.contract.shardings import explicit_sharding
from optperm.subspace.matrices import product, project


def gram_basis(g: jax.Array, rank: int) -> jax.Array:
    """Return the first left singular vectors of G, by its Gram matrix on the smaller side.

    Squaring halves the digits: directions below the root of the machine's precision times the first
    are any that complete the basis.
    """
    if g.shape[-2] <= g.shape[-1]:
        return _last_eigenvectors(_whole("...dk,...ek->...de", g, g), rank)
    # G v of the right ones; where G is of lower rank, the QR completes them.
    right = _last_eigenvectors(_whole("...dk,...dl->...kl", g, g), rank)
    return jnp.linalg.qr(_whole("...dk,...kr->...dr", g, right))[0]


def power_basis(g: jax.Array, basis: jax.Array) -> jax.Array:
    r"""Return an orthonormal basis of :math:`G G^\top P`: one step of subspace iteration."""
    return jnp.linalg.qr(_whole("...dk,...rk->...dr", g, project(basis, g)))[0]


def random_basis(key: jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return an orthonormal basis of a subspace that is uniformly distributed."""
    return jnp.linalg.qr(jax.random.normal(key, shape, dtype))[0]


def align_signs(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the new basis, each column with the sign for which its product with the old one is >= 0."""
    products = jnp.sum(new * old, axis=-2, keepdims=True)
    return jnp.where(products < 0, -new, new)


def rotate(new: jax.Array, old: jax.Array, low: jax.Array, *, squared: bool = False) -> jax.Array:
    r"""Return :math:`C M`, with :math:`C = P_{new}^\top P_{old}` or the squares of its entries.

    Args:
      new: The new basis, (..., d, r).
      old: The old one.
      low: M, (..., r, k), in the coordinates of the old one.
      squared: Whether entries of C are squared.
    """
    c = _whole("...dr,...ds->...rs", new, old)
    return product("...rs,...sk->...rk", c * c if squared else c, low, explicit_sharding(low))


def _last_eigenvectors(gram: jax.Array, rank: int) -> jax.Array:
    """Return those of the largest eigenvalues, the largest one first."""
    return jnp.linalg.eigh(gram)[1][..., ::-1][..., :rank]


def _whole(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product all of which lies on each device."""
    sharding = explicit_sharding(a)
    return product(subscripts, a, b, sharding and sharding.update(spec=PartitionSpec()))
