"""Make params sparse only in the forward pass, with a straight-through estimator of top-k."""

from typing import Any

import jax
import jax.numpy as jnp

from optperm._leaf_axes import warn_of_others
from optperm.core import checks
from optperm.core.trees import fill_masked, without_variables
from optperm.sparsity._choice import (
    Include,
    UnitScope,
    encode_scores,
    include_leaves,
    is_zero,
    keep,
    widen_scores,
)
from optperm.sparsity._structures import Structure, as_structure


def keep_top(
    params: Any,
    sparsity: Any,
    *,
    scope: UnitScope = "erk",
    include: Include | None = None,
    structure: Structure | None = None,
    axes: Any = None,
) -> Any:
    r"""Set the smallest entries of params to zero, and pass gradients through unchanged.

    .. math::
      w_i \mapsto \begin{cases} w_i & \text{if } m_i \\ 0 & \text{else} \end{cases}, \qquad
      \text{with the derivative } 1

    Call this function on the params inside the loss. The network is then sparse, but the optimizer
    trains all weights, so zero weights can return. At the end, `optperm.sparsity.prune` makes the params
    sparse.

    Args:
      params: A tree of arrays, with real floating dtypes in the included leaves.
      sparsity: The fraction of zeros, as in `optperm.sparsity.prune`: a number or a tree of numbers. It
        can be traced, such as `schedule(step)`. None with `optperm.sparsity.NOfM`.
      scope: As in `optperm.sparsity.prune`.
      include: The leaves that become sparse, as in `optperm.sparsity.prune`.
      structure: `optperm.sparsity.NOfM`, `optperm.sparsity.Blocks` or `optperm.sparsity.Units`.
        None for single entries.
      axes: What each leaf is, as in `optperm.sparsity.prune`.

    Returns:
      A tree like params, in which each entry is unchanged or zero.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> w = jnp.array([[1.0, -3.0], [2.0, 0.5]])
      >>> optperm.sparsity.keep_top(w, 0.5).tolist()
      [[0.0, -3.0], [2.0, 0.0]]
      >>> jax.grad(lambda w: optperm.sparsity.keep_top(w, 0.5).sum())(w).tolist()
      [[1.0, 1.0], [1.0, 1.0]]

    Notes:
      Every forward pass selects entries. In a small network, this takes longer than the rest of the
      step. The selection of `NOfM` is cheap.

    Raises:
      TypeError: If an included parameter does not have a real floating dtype, a leaf is not an array, or
        a sparsity is not a number.
      ValueError: If `sparsity` is out of range, if a structure, a tree or `axes` does not fit, or if no
        leaf is included although `sparsity` is not 0.

    References:
      Bengio et al., `Estimating or Propagating Gradients Through Stochastic Neurons
      <https://arxiv.org/abs/1308.3432>`_, 2013
    """
    plain = without_variables(params)
    checks.check_arrays("params", plain)
    units = as_structure(structure)
    # A leaf that is not included may have any dtype.
    taken, known = include_leaves(include, axes, plain, params, fractions=sparsity)
    if include is None and not is_zero(sparsity):
        warn_of_others("keep_top", params, axes)
    fixed = jax.lax.stop_gradient(taken)
    scores = jax.tree.map(jnp.abs, widen_scores("params", fixed, fixed))
    codes = encode_scores(scores, known, units)
    kept = keep("sparsity", codes, sparsity, scope, fixed, known, units)
    top = fill_masked(jax.tree.map(_pass_through, taken, kept), plain)
    return jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(top))


# w where m, else 0, with the derivative of w.
@jax.custom_jvp
def _pass_through(w: jax.Array, is_kept: jax.Array) -> jax.Array:
    return jnp.where(is_kept, w, jnp.zeros_like(w))


_pass_through.defjvps(lambda tangent, result, w, is_kept: tangent, None)
