"""Compute orthonormal bases, (..., d, r), of small subspaces for gradients G, (..., d, k)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from optperm.core.noise import normal
from optperm.core.shardings import explicit_sharding
from optperm.memory._matrices import product, project


def gram_basis(g: jax.Array, rank: int) -> jax.Array:
    """Return the first left singular vectors of G from its Gram matrix on the smaller side.

    A Gram matrix halves the precision: directions are arbitrary if their singular value is below the
    maximum times the root of the machine epsilon.
    """
    # G G' = U S^2 U'
    if g.shape[-2] <= g.shape[-1]:
        return _last_eigenvectors(_whole("...dk,...ek->...de", g, g), rank)
    # G' G = V S^2 V' and G V = U S. QR normalizes U S, and completes the basis if G has a lower rank.
    right = _last_eigenvectors(_whole("...dk,...dl->...kl", g, g), rank)
    return jnp.linalg.qr(_whole("...dk,...kr->...dr", g, right))[0]


def power_basis(g: jax.Array, basis: jax.Array) -> jax.Array:
    r"""Return an orthonormal basis of :math:`G G^\top P`: one step of subspace iteration."""
    return jnp.linalg.qr(_whole("...dk,...rk->...dr", g, project(basis, g)))[0]


def random_basis(
    data: jax.Array, number: int | jax.Array, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Return an orthonormal basis of a subspace that is uniformly distributed.

    Args:
      data: The raw data of a key.
      number: The number of the leaf, so that leaves of the same shape get different bases.
      shape: (..., d, r).
      dtype: The dtype of the basis.
    """
    return jnp.linalg.qr(normal(data, number, shape, dtype))[0]


def lay_out_rows(basis: jax.Array) -> jax.Array:
    """Return a basis whose rows are contiguous in memory, like all other arrays.

    QR and eigenvectors are computed by columns. Without this constraint, XLA lays out the whole loop
    that changes bases and moments by columns, and copies them in and out of it in every step.
    """
    return with_layout_constraint(basis, Layout(tuple(range(basis.ndim))))


def align_signs(new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the new basis, with signs so that products of old and new columns are nonnegative."""
    products = jnp.sum(new * old, axis=-2, keepdims=True)
    return jnp.where(products < 0, -new, new)


def rotate(new: jax.Array, old: jax.Array, low: jax.Array, *, squared: bool = False) -> jax.Array:
    r"""Return :math:`C M`, with :math:`C = P_{new}^\top P_{old}` or the squares of its entries.

    Args:
      new: The new basis, (..., d, r).
      old: The old basis.
      low: M, (..., r, k), in the coordinates of the old basis.
      squared: Whether the entries of C are squared.
    """
    c = _whole("...dr,...ds->...rs", new, old)
    return product("...rs,...sk->...rk", c * c if squared else c, low, explicit_sharding(low))


def _last_eigenvectors(gram: jax.Array, rank: int) -> jax.Array:
    """Return the eigenvectors of the largest eigenvalues, in descending order."""
    return jnp.linalg.eigh(gram)[1][..., ::-1][..., :rank]


def _whole(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a matrix product that is replicated on all devices."""
    sharding = explicit_sharding(a)
    return product(subscripts, a, b, sharding and sharding.update(spec=PartitionSpec()))
