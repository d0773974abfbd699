"""What the wrappers that train sparse networks share: their state, and how updates land on zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import shard_like
from optperm.contract.states import is_masked

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float32, Int32, PyTree, UInt32


class SparseState(NamedTuple):
    """State of `prune_gradually` and of `rigl`.

    Attributes:
      count: The steps taken.
      mask: Which entries live; `optax.MaskedNode` for a leaf that is not included.
      inner: The state of the optimizer inside.
      scores: S of criterion "movement", like the mask; None for others.
      key: The raw data of the key of `grow="random"`; None for others.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mask: PyTree[Bool[Array, "..."]]
    inner: Any
    scores: PyTree[Float32[Array, "..."]] | None = None
    key: UInt32[Array, "2"] | None = None

    def zero_masks(self) -> list[Any]:
        """Return the mask, for `optperm.apply_updates`."""
        return [self.mask]


def live_like(flags: Any, params: Any) -> Any:
    """Return a mask of True for each included leaf, `optax.MaskedNode` for the others."""

    def mask(flag: bool, leaf: Any) -> Any:
        ones = mark_varying(jnp.ones_like(leaf, bool), varying_axes(leaf))
        return shard_like(ones, leaf) if flag else optax.MaskedNode()

    return jax.tree.map(mask, flags, params)


def hide(mask: Any, tree: Any) -> Any:
    """Return the tree with 0 in the place of each entry that does not live."""

    def hide_leaf(m: Any, leaf: Any) -> Any:
        return leaf if is_masked(m) else jnp.where(m, leaf, jnp.zeros([], leaf.dtype))

    return jax.tree.map(hide_leaf, mask, tree, is_leaf=is_masked)


def land(mask: Any, updates: Any, params: Any, before: Any = None) -> Any:
    """Return updates that put params on exactly 0.0 where the mask says, and move the others.

    Args:
      mask: Which entries live after this step.
      updates: How they move.
      params: Where they are.
      before: Which entries lived before, where others may live now: those start at 0, wherever they are.
    """

    # w + (-w) is +0.0 in every dtype, for any finite w.
    def land_leaf(m: Any, u: Any, w: Any, was_live: Any) -> Any:
        if is_masked(m):
            return u
        u = jnp.asarray(u, w.dtype)
        return jnp.where(m, jnp.where(was_live, u, u - w), -w)

    before = mask if before is None else before
    return jax.tree.map(land_leaf, mask, updates, params, before, is_leaf=is_masked)
