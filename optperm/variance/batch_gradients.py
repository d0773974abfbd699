"""Gradients on the batch of a step at other params, and the order in which they are taken."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.states import mask_like

GradFn = Callable[[optax.Params], optax.Updates]
BATCH_GRADIENT = {"grad_fn": "the gradient on this batch at given params"}


def gradient_at(params: optax.Params, grad_fn: GradFn, name: str = "grad_fn") -> optax.Updates:
    """What a function of that name says of the gradient at params, as a tree like them."""
    grads = mask_like(grad_fn(params), params)
    checks.check_same_tree(f"{name}(params)", grads, params, source="params", dtypes=False)
    return grads


def in_order(first: Any, second: Any) -> tuple[Any, Any]:
    """Both trees, the first of them computed, once, before anything is made of the second.

    Else XLA computes the first again wherever it is used, from copies of the state that it is made of.
    """
    return jax.lax.optimization_barrier((first, second))


def where_finite(new: optax.Params, old: optax.Params) -> optax.Params:
    """The new tree, with the old one's entries for those that are not finite."""
    return jax.tree.map(
        lambda x, y: jnp.where(jnp.isfinite(x), jnp.asarray(x, y.dtype), y), new, old
    )
