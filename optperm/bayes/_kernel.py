"""The kernel of constant SGD: the noise of its gradients, and the steps that sample the posterior."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.core.dtypes import accumulation_dtype, cast_like, computed_once
from optperm.core.shardings import unshard
from optperm.core.states import find_state
from optperm.core.trees import mask_like

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree


class NoiseKernel(NamedTuple):
    r"""The noise, curvature and basis of constant SGD, which the warm-up hands over and no step changes.

    With :math:`C` the covariance of one example's gradient, :math:`A` the Hessian of the mean loss and
    :math:`s = 2 S T / N`, the columns :math:`w_i` of a basis :math:`W` are such that

    .. math::
      W^\top C W = \operatorname{diag}(\Lambda), \qquad H = W \operatorname{diag}(h) W^\top

    The fraction of a step's noise that may come from the batches, and the curvature
    :math:`a_i \approx w_i^\top A w_i`, limit the steps :math:`h_i`; injected noise adds the rest:

    .. math::
      h_i = \frac{s}{\max\left(\Lambda_i (1 + 1 / \rho), s a_i / c\right)}, \qquad
      b_i = \frac{s}{h_i} - \Lambda_i, \qquad
      \xi = W^{-\top} \operatorname{diag}(\sqrt{b / S}) z

    So the noise of a step :math:`-H (g + \xi)` has the covariance
    :math:`W \operatorname{diag}(h (\Lambda + b) h / S) W^\top = (2 T / N) H` for any a and c.

    Attributes:
      basis: :math:`W`, (D, D), of the full preconditioner; an empty tuple where :math:`W = I`.
      noise: :math:`\Lambda`: (D,) of the full preconditioner, a tree like params of the diagonal one,
        a single number of the scalar one.
      curvature: :math:`a`, of the same form: :math:`w_i^\top A w_i` corrected for momentum, for the
        spread of the batches' curvatures and for `excess`.
      noise_ratio: :math:`\rho`, the maximum ratio of the batches' noise to the injected noise.
      stability: :math:`\lambda_{\max}(H A) (1 - \mu) / (1 + \mu)`, measured in the last window.
      excess: The factor on the :math:`a_i` that brings `stability` down to c.
      drift: The noise in the last window over the noise in the window before.
      correlation: Without a basis, the noise of steps along the direction of maximum curvature over the
        noise without correlation: above 1 where the noise of entries is correlated.
      estimates: Number of estimates of C in the last window.
      is_ready: Whether noise and curvature are known; until then no step is taken.
    """

    basis: Any  # Float[Array, "d d"], or ()
    noise: PyTree[Float[Array, "..."]]
    curvature: PyTree[Float[Array, "..."]]
    noise_ratio: Float32[Array, ""]
    stability: Float32[Array, ""]
    excess: Float32[Array, ""]
    drift: Float32[Array, ""]
    correlation: Float32[Array, ""]
    estimates: Int32[Array, ""]
    is_ready: Bool[Array, ""]

    def step_sizes(self, scale: jax.Array, limit: jax.Array, rate: jax.Array | float = 1.0) -> Any:
        """Return h, of the form of the noise; an entry without noise and curvature takes no step.

        Args:
          scale: s.
          limit: c.
          rate: Factor on c and rho.
        """

        # h_i = s / max(Lambda_i (1 + 1 / rho), s a_i / c)
        def of_entry(noise: jax.Array, curvature: jax.Array) -> jax.Array:
            s, c, rho = (
                jnp.asarray(x, noise.dtype) for x in (scale, limit * rate, self.noise_ratio * rate)
            )
            h = s / jnp.maximum(noise * (1 + 1 / rho), s * curvature / c)
            return jnp.where(jnp.isfinite(h), h, 0.0)

        return jax.tree.map(of_entry, self.noise, self.curvature)

    def injected(self, h: Any, scale: jax.Array) -> Any:
        """Return b, of the form of the noise: the variance that makes a step's noise s / h.

        Args:
          h: The steps.
          scale: s.
        """

        # b_i = s / h_i - Lambda_i
        def of_entry(noise: jax.Array, h: jax.Array) -> jax.Array:
            b = scale.astype(h.dtype) / jnp.where(h > 0, h, 1.0) - noise
            return jnp.where(h > 0, jnp.maximum(b, 0.0), 0.0)

        return jax.tree.map(of_entry, self.noise, h)

    def coordinates(self, grads: optax.Updates) -> Any:
        """Return W^T g: (D,) of the full preconditioner, else g itself, in float32 or wider.

        Args:
          grads: g, a tree like params.
        """
        if isinstance(self.basis, tuple):
            grads = mask_like(grads, self.noise)
            return jax.tree.map(lambda g: jnp.asarray(g, accumulation_dtype(g)), grads)
        return _multiply(self.basis.T, flat(grads, self.basis))

    def params_of(self, coordinates: Any, like: optax.Params) -> Any:
        """Return W x as a tree like params.

        Args:
          coordinates: x, as `coordinates` gives them.
          like: The params, for their structure.
        """
        if isinstance(self.basis, tuple):
            return coordinates
        leaves = unshard(jax.tree.map(lambda p: jnp.asarray(p, self.basis.dtype), like))
        return ravel_pytree(leaves)[1](_multiply(self.basis, coordinates))

    def precondition(self, grads: optax.Updates, h: Any) -> optax.Updates:
        """Return H g, a tree like g, in its dtypes.

        Args:
          grads: g, a tree like params.
          h: The steps.
        """
        moves = self.params_of(times(h, self.coordinates(grads)), grads)
        return cast_like(moves, mask_like(grads, moves))


def adapted_kernel(opt_state: Any) -> NoiseKernel:
    """Return the kernel of `optperm.constant_sgd` or `optperm.mandt_sgd`.

    Args:
      opt_state: The state of an optimizer that contains one of them, in any nesting.

    Returns:
      The `NoiseKernel`. Its `noise` is zero before the first estimate.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> tx = optperm.mandt_sgd(num_data=100, batch_size=4)
      >>> w = jnp.array([0.0, 0.0])
      >>> grads = jnp.array([[1.0, 0.0], [3.0, 0.0], [1.0, 2.0], [3.0, 2.0]])
      >>> extras = {"per_example_grad_fn": lambda w: grads}
      >>> _, opt_state = tx.update(grads.mean(0), tx.init(w), w, **extras)
      >>> [round(float(c), 4) for c in optperm.bayes.adapted_kernel(opt_state).noise]
      [1.3333, 1.3333]

    Raises:
      ValueError: If there is no such state, or more than one.
    """
    return find_state(opt_state, NoiseKernel, method="constant_sgd or optperm.mandt_sgd")


def times(h: Any, coordinates: Any) -> Any:
    """Return the products of coordinates with their numbers, or with a single number."""
    if is_number(h):
        return jax.tree.map(lambda x: h.astype(x.dtype) * x, coordinates)
    return jax.tree.map(lambda h, x: h.astype(x.dtype) * x, h, coordinates)


def flat(tree: Any, basis: jax.Array) -> jax.Array:
    """Return a tree as a vector, in the order of `jax.flatten_util.ravel_pytree`.

    Args:
      tree: Like the params.
      basis: W, for its dtype.
    """
    leaves = unshard(jax.tree.map(lambda leaf: jnp.asarray(leaf, basis.dtype), tree))
    return ravel_pytree(leaves)[0]


def is_number(tree: Any) -> bool:
    """Return whether a tree is a single number."""
    return jax.tree_util.all_leaves([tree]) and jnp.ndim(tree) == 0


def inner(one: Any, other: Any) -> jax.Array:
    """Return the inner product of two trees, in float32 or wider."""
    dtype = accumulation_dtype(one)
    parts = jax.tree.map(lambda a, b: jnp.sum(a * b.astype(a.dtype)).astype(dtype), one, other)
    # A sum that XLA fuses with what it scales is computed again for each leaf
    return computed_once(sum(jax.tree.leaves(parts), start=jnp.zeros([], dtype)))


def _multiply(matrix: jax.Array, vector: jax.Array) -> jax.Array:
    return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)
