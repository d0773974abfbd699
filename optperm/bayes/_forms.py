"""The forms of a preconditioner H = W diag(h) W^T: full, diagonal (W = I) and scalar (W = I, one h)."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.keys import key_data
from optperm.core.noise import normal_like
from optperm.core.shapes import Array, Float, Params, Updates
from optperm.core.shardings import unshard
from optperm.core.trees import mask_like

Preconditioner = Literal["scalar", "diagonal", "full"]

# The rounding error of gradients is about this many epsilons of their dtype.
_ROUNDING = 10.0


class Diagonal(NamedTuple):
    """The diagonal form, W = I: values of this form, such as h, are trees like params."""

    @classmethod
    def like(cls, params: Params) -> Diagonal:
        """Return the form for params."""
        del params
        return cls()

    def zeros(self, params: Params) -> Any:
        """Return zeros of this form."""
        return jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params)

    def coordinates(self, tree: Any, like: Any) -> Any:
        """Return W^T g, here g itself, in float32 or wider, without the entries masked in `like`."""
        return _widen(mask_like(tree, like))

    def flat(self, tree: Any) -> Any:
        """Return a tree like params in the shape of coordinates, without W: unchanged here."""
        return tree

    def params_of(self, x: Any, like: Params) -> Any:
        """Return W x, a tree like params."""
        del like
        return x

    def times(self, h: Any, x: Any) -> Any:
        """Return diag(h) x."""
        return jax.tree.map(lambda h, x: h.astype(x.dtype) * x, h, x)

    def pool(self, q: Any) -> Any:
        """Return values of this form from one number per coordinate."""
        return q

    def outer(self, deviations: Updates) -> Any:
        """Return the stored part of the sum of d d^T, the diagonal here; d has a leading axis."""
        return jax.tree.map(lambda d: jnp.sum(d**2, axis=0), deviations)

    def covariance(self, deviations: Updates) -> Any:
        """Return the stored part of the sum of W^T d (W^T d)^T."""
        return self.outer(deviations)

    def variances(self, covariance: Any) -> Any:
        """Return w_i^T C w_i."""
        return covariance

    def lengths(self, h: Any) -> Any:
        """Return the largest magnitude in each w_i."""
        return optax.tree.ones_like(h)

    def num_needed(self, noise: Any) -> int:
        """Return the minimum number of gradients for an estimate of C: 0."""
        del noise
        return 0

    def turn(self, covariance: Any, curvature: Any, size: Any) -> tuple[Any, Any, Any]:
        """Return the form in which C is diagonal, its noise, and the curvature in its directions."""
        del size
        return self, covariance, curvature

    def probes(self, params: Params) -> tuple[Any, ...]:
        """Return random x, the starts of the search for extreme eigenvalues of the noise correlation."""
        return normal_like(key_data(1), params), normal_like(key_data(2), params)


class Scalar(Diagonal):
    """The scalar form, W = I: one number for all entries."""

    __slots__ = ()

    def zeros(self, params: Params) -> Any:
        """Return a zero."""
        return jnp.zeros([], accumulation_dtype(params))

    def coordinates(self, tree: Any, like: Any) -> Any:
        """Return g, in float32 or wider."""
        del like
        return _widen(tree)

    def times(self, h: Any, x: Any) -> Any:
        """Return h x."""
        return jax.tree.map(lambda x: h.astype(x.dtype) * x, x)

    def pool(self, q: Any) -> Any:
        """Return the mean over all entries."""
        return inner(q, optax.tree.ones_like(q)) / optax.tree.size(q)

    def outer(self, deviations: Updates) -> Any:
        """Return the mean of the diagonal of the sum of d d^T."""
        size = max(1, sum(leaf[0].size for leaf in jax.tree.leaves(deviations)))
        return inner(deviations, deviations) / size


class Full(NamedTuple):
    """The full form: values of this form, such as h, are vectors (D,).

    Attributes:
      w: W, (D, D).
    """

    w: Float[Array, "d d"]

    @classmethod
    def like(cls, params: Params) -> Full:
        """Return the form for params, with W = I."""
        return cls(jnp.identity(optax.tree.size(params), accumulation_dtype(params)))

    def zeros(self, params: Params) -> jax.Array:
        """Return zeros of this form."""
        return jnp.zeros(optax.tree.size(params), accumulation_dtype(params))

    def coordinates(self, tree: Any, like: Any) -> jax.Array:
        """Return W^T g."""
        del like
        return dot(self.w.T, self.flat(tree))

    def flat(self, tree: Any) -> jax.Array:
        """Return a tree as a vector, in the order of `jax.flatten_util.ravel_pytree`."""
        return ravel_pytree(self._unsharded(tree))[0]

    def params_of(self, x: jax.Array, like: Params) -> Any:
        """Return W x as a tree like params."""
        return ravel_pytree(self._unsharded(like))[1](dot(self.w, x))

    def times(self, h: jax.Array, x: jax.Array) -> jax.Array:
        """Return diag(h) x."""
        return h.astype(x.dtype) * x

    def pool(self, q: jax.Array) -> jax.Array:
        """Return numbers of this form from one number for each coordinate."""
        return q

    def outer(self, deviations: Updates) -> jax.Array:
        """Return the sum of d d^T."""
        rows = _rows_of(deviations)
        return dot(rows.T, rows)

    def covariance(self, deviations: Updates) -> tuple[jax.Array, jax.Array]:
        """Return the sum of W^T d (W^T d)^T, and the sum of the squares of d."""
        # W^T C W is better conditioned than C, in which float32 would lose narrow directions
        rows = _rows_of(deviations)
        coordinates = dot(rows, self.w)
        return dot(coordinates.T, coordinates), jnp.sum(rows**2, axis=0)

    def variances(self, covariance: tuple[jax.Array, jax.Array]) -> jax.Array:
        """Return w_i^T C w_i."""
        return jnp.diagonal(covariance[0])

    def lengths(self, h: jax.Array) -> jax.Array:
        """Return the largest magnitude in each w_i."""
        del h
        return jnp.max(jnp.abs(self.w), axis=0)

    def num_needed(self, noise: jax.Array) -> int:
        """Return the minimum number of gradients for an invertible C: D."""
        return int(noise.shape[-1])

    def turn(
        self, covariance: tuple[jax.Array, jax.Array], curvature: jax.Array, size: jax.Array
    ) -> tuple[Full, jax.Array, jax.Array]:
        r"""Return the form in which C is diagonal, its noise, and the curvature in its directions.

        If :math:`W^\top A W \approx M = \operatorname{diag}(m)`, the new directions are
        :math:`W M^{-1/2} R` with the rotation R that makes C diagonal. They fit both matrices:

        .. math::
          R^\top M^{-1/2} W^\top C W M^{-1/2} R = \Lambda, \qquad
          R^\top M^{-1/2} W^\top A W M^{-1/2} R \approx I

        Args:
          covariance: C, as stored by this form.
          curvature: a.
          size: m, positive where a is.
        """
        c, units = covariance
        variances = jnp.diagonal(c)
        # The variance that rounding alone would show, if the entries of gradients were independent
        least = (_ROUNDING * jnp.finfo(c.dtype).eps) ** 2 * dot((self.w**2).T, units)
        m = jnp.where(size > 0, size, jnp.where(variances > 0, variances, 1.0))
        scale = jax.lax.rsqrt(m)
        noise, rotation = _eigh_of_part(c * scale[:, None] * scale[None], variances > least)
        turned = dot((rotation**2).T, curvature * scale**2)
        return Full(dot(self.w * scale[None], rotation)), jnp.maximum(noise, 0.0), turned

    def probes(self, params: Params) -> tuple[Any, ...]:
        """Return no probes, because the noise is not correlated in these coordinates."""
        del params
        return ()

    def _unsharded(self, tree: Any) -> Any:
        return unshard(jax.tree.map(lambda leaf: jnp.asarray(leaf, self.w.dtype), tree))


Form = Full | Diagonal
FORMS: dict[Preconditioner, Any] = {"scalar": Scalar, "diagonal": Diagonal, "full": Full}


def _rows_of(tree: Any) -> jax.Array:
    """Return a tree with a leading axis as a matrix, with rows as in `jax.flatten_util.ravel_pytree`."""
    dtype, leaves = accumulation_dtype(tree), jax.tree.leaves(unshard(tree))
    flat = [leaf.reshape(leaf.shape[0], -1).astype(dtype) for leaf in leaves]
    return jnp.concatenate(flat, axis=1) if flat else jnp.zeros((1, 0), dtype)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a product of matrices or vectors in full precision."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def inner(one: Any, other: Any) -> jax.Array:
    """Return the inner product of two trees, in float32 or wider."""
    dtype = accumulation_dtype(one)
    parts = jax.tree.map(lambda a, b: jnp.sum(a * b.astype(a.dtype)).astype(dtype), one, other)
    # Parts computed once share kernels. Without this, XLA would compute the sum again for each leaf
    parts = computed_once(jax.tree.leaves(parts))
    return computed_once(sum(parts, start=jnp.zeros([], dtype)))


def update_mean(mean: Any, new: Any, n: jax.Array) -> Any:
    """Return the mean of n values after the n-th value, `new`."""
    # This form keeps the first estimate bit for bit
    rate = 1 / n
    return jax.tree.map(
        lambda m, x: (1 - rate).astype(m.dtype) * m + rate.astype(m.dtype) * x, mean, new
    )


def _eigh_of_part(matrix: jax.Array, is_inside: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return eigenpairs of a part of a matrix; entries outside come first, with the eigenvalue -1."""
    # Without the mask, rounding would mix 1e-7 of the other entries into an entry without noise, and the
    # next window would mistake this error for its noise and curvature
    is_both = is_inside[:, None] & is_inside[None]
    size = jnp.max(jnp.where(is_both, jnp.abs(matrix), 0.0))
    inside = jnp.where(is_both, matrix / jnp.where(size > 0, size, 1.0), 0.0)
    values, vectors = jnp.linalg.eigh(inside - jnp.diag(jnp.where(is_inside, 0.0, 1.0)))
    is_outside = jnp.arange(len(values)) < jnp.sum(jnp.logical_not(is_inside))
    vectors = jnp.where(is_inside[:, None] == is_outside[None], 0.0, vectors)
    return jnp.where(is_outside, -1.0, values * size), vectors


def _widen(tree: Any) -> Any:
    return jax.tree.map(lambda g: jnp.asarray(g, accumulation_dtype(g)), tree)
