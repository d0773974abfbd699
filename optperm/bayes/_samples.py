"""The draws of chains, with the data that describe the draws."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.shapes import Array, Bool, Float, Int32, PyTree, Shaped
from optperm.core.trees import without_variables


class Samples(NamedTuple):
    r"""The draws of `draw_samples`, and the state from which the chains continue.

    Attributes:
      params: The draws; in float32 where a sampler of this library keeps a copy of 16-bit params.
      last_params: The iterates at the end, whose leaves have a leading axis of chains.
      last_opt_state: The optimizer states at the end, with the same axis.
      next_step: Number of steps that each chain has taken; the `first_step` of a later call.
      thinning: Number of steps from one draw to the next.
      starts: The first params of the chains, with a leading axis of chains.
      batch_noise: For draws of `optperm.bayes.sample` with SGLD or SGHMC, the variances of a batch's
        gradient, a tree like params. For constant SGD with `kernel=`, the variances of
        :math:`w_i^\top g`, with the structure of the kernel's noise. Otherwise None.
      batch_noise_norm: The maximum eigenvalue of the covariance R that has these variances; None if it
        was not measured.
      step_sizes: For draws of one `sgld`, `sghmc` or `constant_sgd`, the mean of the step size over the
        steps from the previous draw: :math:`\epsilon`, :math:`\eta` or c times the learning rate (0 for
        `sgld` with a preconditioner).
      temperatures: The mean of the temperature over the same steps.
      is_mean: Whether the loss of a batch is a mean over its examples; None if this was not checked.
      is_gradient: Whether the sampler gets the gradient of the loss; None if this was not checked.
    """

    params: PyTree[Shaped[Array, "chain draw ..."]]
    last_params: PyTree[Shaped[Array, "chain ..."]]
    last_opt_state: PyTree[Shaped[Array, "chain ..."]]
    next_step: Int32[Array, ""]
    thinning: Int32[Array, ""]
    starts: PyTree[Shaped[Array, "chain ..."]] = None
    batch_noise: PyTree[Shaped[Array, "..."]] = None
    batch_noise_norm: Float[Array, ""] | None = None
    step_sizes: Float[Array, "chain draw"] | None = None
    temperatures: Float[Array, "chain draw"] | None = None
    is_mean: Bool[Array, ""] | None = None
    is_gradient: Bool[Array, ""] | None = None

    def as_dict(self, *, separator: str = ".") -> dict[str, np.ndarray]:
        """Return the draws as a flat dictionary of arrays, which every version of ArviZ accepts.

        `arviz.rhat` and `arviz.ess` accept the dataset::

            arviz.convert_to_dataset(samples.as_dict())

        Args:
          separator: The string that joins the parts of a path to a name. ArviZ 1 and later reject a
            slash.

        Returns:
          A dictionary from names, such as "dense.kernel", to NumPy arrays `(chain, draw, *shape)`. If
          the params are a single array, its name is "params". 16-bit floats become float32.

        Example:
          >>> import jax, jax.numpy as jnp, optperm
          >>> step = lambda params, opt_state, key: (params, opt_state)  # no sampler
          >>> samples = optperm.bayes.draw_samples(
          ...     step, {"dense": {"bias": jnp.zeros(3)}}, (), 0, num_chains=2, num_draws=1
          ... )
          >>> {name: draws.shape for name, draws in samples.as_dict().items()}
          {'dense.bias': (2, 1, 3)}

        Raises:
          ValueError: If two leaves have the same name, or the axes of chains and draws differ between
            leaves.
        """
        params = without_variables(self.params)
        check_draws(params)
        arrays: dict[str, np.ndarray] = {}
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            name = jax.tree_util.keystr(path, simple=True, separator=separator) or "params"
            if name in arrays:
                raise ValueError(
                    f"Two leaves of params have the name {name!r}: rename a key, or pass another "
                    "separator."
                )
            is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4
            arrays[name] = np.asarray(leaf, np.float32 if is_narrow else None)
        return arrays


def check_has_params(params: Any) -> None:
    """Raise a ValueError if there is nothing to sample."""
    if not jax.tree.leaves(params):
        raise ValueError(f"params must contain arrays to sample, got {params!r}.")


def check_draws(params: Any) -> None:
    """Raise unless all leaves have the same two leading axes, chains and draws."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    axes = {shape[:2] for shape in shapes}
    if len(axes) != 1 or any(len(shape) < 2 or 0 in shape[:2] for shape in shapes):
        raise ValueError(
            "The params of samples must be arrays whose first two axes are (chains, draws), the same in "
            f"all leaves, and not empty; got shapes {shapes}."
        )


def check_samples(samples: Any) -> None:
    """Raise a TypeError unless these are `Samples`; bare arrays do not show which axes are chains."""
    if not isinstance(samples, Samples):
        raise TypeError(
            f"samples must be Samples, got {type(samples).__name__}. To use draws from elsewhere, "
            "a tree of arrays of shape (chain, draw, ...), wrap them: optperm.bayes.Samples(draws, "
            "jax.tree.map(lambda x: x[:, -1], draws), (), num_draws, 1)."
        )
