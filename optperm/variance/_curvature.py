"""Measure the curvature of a loss: Hessian products, the largest eigenvalue, and inverse roots."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.core.shapes import Params, Updates

# The number of columns of a Hessian that are computed at once.
_COLUMNS = 64
# The maximum number of inputs of a leaf whose curvature is a matrix, and the ridge of this matrix.
_FACTOR, _RIDGE = 1024, 0.1


def hessian_product(
    loss: Callable[[Any], jax.Array], params: Params
) -> Callable[[Updates], Updates]:
    """Return the function from a tree v like params to H v, with the Hessian H of a loss at params."""
    gradient = jax.grad(loss)
    return lambda v: jax.jvp(gradient, (params,), (v,))[1]


def hessian_matrix(loss: Callable[[jax.Array], jax.Array], w: jax.Array) -> jax.Array:
    """Return the Hessian of a loss of a vector, column by column."""
    basis = jnp.eye(w.size, dtype=w.dtype)
    h = jax.lax.map(hessian_product(loss, w), basis, batch_size=min(_COLUMNS, w.size))
    return (h + h.T) / 2


def largest_eigenvalue(
    multiply: Callable[[Updates], Updates], start: Updates, num_steps: int
) -> jax.Array:
    """Return the eigenvalue of the largest magnitude, with its sign, from a power iteration.

    Args:
      multiply: The product of a symmetric matrix with a tree.
      start: A random tree, from which the iteration starts.
      num_steps: The number of products.
    """

    def step(v: Any, _: None) -> tuple[Any, jax.Array]:
        # v <- H v / |v|, and v' H v is the eigenvalue
        for order in (jnp.inf, 2):  # divide by the maximum first, since squares may overflow
            size = optax.tree.norm(v, ord=order)
            v = optax.tree.scale(1 / jnp.where(size > 0, size, jnp.ones_like(size)), v)
        product = multiply(v)
        return product, optax.tree.vdot(v, product)

    return jax.lax.scan(step, start, None, length=num_steps)[1][-1]


def inverse_root(h: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return C with :math:`C C^T = H^{-1}`, and the lowest eigenvalue of the scaled H.

    H is scaled to a unit diagonal first, so that the scales of params do not matter. The lowest
    eigenvalue is relative to the largest. If H is singular up to rounding, its small eigenvalues are
    replaced by their rounding error.
    """
    # H = S^-1 V diag(values) V' S^-1, so C = S V diag(values)^-1/2
    diagonal = jnp.abs(jnp.diag(h))
    s = jax.lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1))
    values, v = jnp.linalg.eigh(s[:, None] * h * s[None])
    largest = jnp.max(jnp.abs(values))
    floor = singular_below(h.dtype) * jnp.where(largest > 0, largest, 1)
    root = s[:, None] * v / jnp.sqrt(jnp.maximum(jnp.abs(values), floor))[None]
    return root, values[0] / jnp.where(largest > 0, largest, 1)


def factor_roots(grads: Any) -> Any:
    r"""Return a root of the inverse curvature of each leaf, from the gradients of examples.

    For a leaf of shape (a, k), such as a dense kernel, the curvature is close to
    :math:`A \otimes S` with the matrix A over the a inputs, and the gradients :math:`G_i` of examples
    have :math:`A \propto \mathrm{E}[G_i z_i z_i^T G_i^T]` for random vectors :math:`z_i`.

    Args:
      grads: The gradients of m examples, a tree like params with a leading axis of m.

    Returns:
      For a leaf of shape (a, k) with a up to 1024 and m / 2, the matrix :math:`(A + r I)^{-1/2}`, where
      r is a tenth of the mean eigenvalue of A; for other leaves, the number
      :math:`\mathrm{E}[g^2]^{-1/2}`.
    """

    def root(g: jax.Array) -> jax.Array:
        m, *shape = g.shape
        if len(shape) != 2 or shape[0] > min(_FACTOR, m // 2):
            return jax.lax.rsqrt(jnp.mean(jnp.square(g)) + jnp.finfo(g.dtype).tiny)
        z = jax.random.rademacher(jax.random.key(0), (m, shape[1]), g.dtype)
        u = jnp.einsum("mak,mk->ma", g, z)
        a = u.T @ u / (m * shape[1])
        mean = jnp.trace(a) / len(a)
        ridge = _RIDGE * mean + jnp.finfo(g.dtype).tiny
        values, v = jnp.linalg.eigh(a + ridge * jnp.eye(len(a), dtype=a.dtype))
        return (v / jnp.sqrt(jnp.maximum(values, ridge))[None]) @ v.T

    return jax.tree.map(root, grads)


def multiply_roots(roots: Any, tree: Any) -> Any:
    """Return the product of the roots of `factor_roots` with a tree like params."""
    return jax.tree.map(lambda c, v: c @ v if jnp.ndim(c) else c * v, roots, tree)


def singular_below(dtype: Any) -> float:
    """Return the relative eigenvalue below which a matrix is singular up to rounding."""
    return 30 * float(jnp.finfo(dtype).eps)
