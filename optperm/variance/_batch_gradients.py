"""Compute gradients of a step's batch at other params."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from optperm.core import checks
from optperm.core.shapes import Params, Updates
from optperm.core.trees import mask_like

GradFn = Callable[[Params], Updates]
BATCH_GRADIENT = {"grad_fn": "the gradient on this batch at given params"}


def evaluate_gradient(params: Params, grad_fn: GradFn, name: str = "grad_fn") -> Updates:
    """Return the gradient from a function at params, a tree like params; `name` is for messages."""
    grads = mask_like(grad_fn(params), params)
    checks.check_same_tree(f"{name}(params)", grads, params, source="params", dtypes=False)
    return grads


def keep_finite(new: Params, old: Params) -> Params:
    """Return the new tree, with nonfinite entries replaced by entries of the old tree."""
    return jax.tree.map(
        lambda x, y: jnp.where(jnp.isfinite(x), jnp.asarray(x, y.dtype), y), new, old
    )
