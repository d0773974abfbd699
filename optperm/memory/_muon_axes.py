"""The axes of a model's kernels, for the Muon of Optax."""

from typing import Any

import jax
from optax.contrib import MuonDimensionNumbers

from optperm._leaf_axes import LeafAxes, leaf_axes, warn_of_others
from optperm.core.shapes import Params
from optperm.core.trees import without_variables


def muon_axes(params: Params, /, *, show: bool = False, **overrides: LeafAxes | None) -> Any:
    """Return the axes of a model's kernels, for `optax.contrib.muon`.

    Without these axes, Muon trains each leaf with two axes, also embeddings and the norms of stacked
    layers, and leaves the kernels of stacked layers to Adam.

    Args:
      params: All params of the model, as in `optperm.leaf_axes`.
      show: Whether to print the table of `optperm.leaf_axes`.
      **overrides: As in `optperm.leaf_axes`. Muon is not meant for the last layer of a language model:
        give None for its name.

    Returns:
      A tree like params with an `optax.contrib.MuonDimensionNumbers` for each kernel, whose other axes
      count copies, and None for the leaves that Adam trains. Pass this tree, and not a function: Muon
      calls a function with a part of the params.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> layers = {"norm": {"scale": jnp.ones((6, 8))}, "up": {"kernel": jnp.ones((6, 8, 32))}}
      >>> params = {"layers": layers, "lm_head": {"kernel": jnp.ones((8, 99))}}
      >>> axes = optperm.memory.muon_axes(params, lm_head=None)
      >>> axes["layers"]["up"]["kernel"], axes["lm_head"]["kernel"]
      (MuonDimensionNumbers(reduction_axis=(1,), output_axis=(2,)), None)
      >>> tx = optax.contrib.muon(0.02, muon_weight_dimension_numbers=axes)

    Notes:
      A `UserWarning` names leaves whose axes are neither known nor given, which Adam trains.

    Raises:
      TypeError: If an override is neither an `optperm.LeafAxes` nor None.
      ValueError: If an override names no element of a path, or its axes do not fit a leaf.
    """

    def of_leaf(axes: LeafAxes) -> MuonDimensionNumbers | None:
        return MuonDimensionNumbers(axes.in_axis, axes.out_axis) if axes.kind == "kernel" else None

    warn_of_others("Muon", params, overrides or None)  # with overrides, `leaf_axes` warns
    return jax.tree.map(of_leaf, without_variables(leaf_axes(params, show=show, **overrides)))
