"""The basis in which the noise of gradients is independent, and of equal size."""

import jax
import jax.numpy as jnp

# Below this fraction of the maximum eigenvalue, times D, a matrix of correlations has rounding alone.
_NOTHING = 1e-7
# Gradients are rounded by about as many epsilons of their dtype.
_ROUNDING = 10.0


def decompose(covariance: jax.Array, units: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return :math:`\Lambda` and R with :math:`R^\top C R = \Lambda` and :math:`R^\top U R` diagonal.

    :math:`\Lambda` is one where there is noise, and zero elsewhere.

    Args:
      covariance: C, in some coordinates, (D, D).
      units: U, the covariance in these coordinates if the entries of gradients were independent, (D, D).
    """
    # C over its diagonal: in float32 the units of coordinates must not decide what rounding hides
    least = (_ROUNDING * jnp.finfo(units.dtype).eps) ** 2 * jnp.diagonal(units)
    diagonal = jnp.diagonal(covariance)
    is_seen = diagonal > least
    root = jnp.sqrt(jnp.where(is_seen, diagonal, jnp.where(least > 0, jnp.diagonal(units), 1.0)))
    scale = root[:, None] * root[None]
    noise, vectors = _eigh_of_part(covariance / scale, is_seen)
    is_noise = noise > _NOTHING * len(noise)
    # R = C^(-1/2) Q for any rotation Q: the Q that makes R^T U R diagonal keeps single entries apart
    whitened = vectors / jnp.where(is_noise, jnp.sqrt(jnp.where(is_noise, noise, 1.0)), 1.0)[None]
    within = jnp.matmul(whitened.T, jnp.matmul(units / scale, whitened, precision="highest"))
    _, rotation = _eigh_of_part(within, is_noise)
    basis = jnp.matmul(whitened, rotation, precision="highest") / root[:, None]
    return is_noise.astype(noise.dtype), basis


def _eigh_of_part(matrix: jax.Array, is_inside: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return eigenvalues and vectors of a part of a matrix; entries outside have -1 and come first."""
    # Without the mask, rounding would put 1e-7 of the noise into entries without noise, and the next
    # window would take it for all of their noise
    is_both = is_inside[:, None] & is_inside[None]
    size = jnp.max(jnp.where(is_both, jnp.abs(matrix), 0.0))
    inside = jnp.where(is_both, matrix / jnp.where(size > 0, size, 1.0), 0.0)
    values, vectors = jnp.linalg.eigh(inside - jnp.diag(jnp.where(is_inside, 0.0, 1.0)))
    is_outside = jnp.arange(len(values)) < jnp.sum(jnp.logical_not(is_inside))
    vectors = jnp.where(is_inside[:, None] == is_outside[None], 0.0, vectors)
    return jnp.where(is_outside, -1.0, values * size), vectors
