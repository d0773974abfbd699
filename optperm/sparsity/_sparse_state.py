"""The state of wrappers that train sparse networks, and updates that reach zero exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optperm.core.dtypes import place_like
from optperm.core.shapes import Array, Bool, Float32, Int32, PyTree, UInt32
from optperm.core.trees import is_masked
from optperm.exact import Exact, exact_entries, placing_states


class SparseState(NamedTuple):
    """State of `prune_gradually` and of `rigl`.

    Attributes:
      count: Number of steps taken.
      mask: Whether each entry is live; `optax.MaskedNode` for a leaf that is not included.
      inner_state: State of `inner`.
      scores: S of the criterion "movement", a tree like the mask; None for the other criteria.
      key: The raw data of the key of `grow="random"`; None for `grow="gradient"`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mask: PyTree[Bool[Array, "..."]]
    inner_state: Any
    scores: PyTree[Float32[Array, "..."]] | None = None
    key: UInt32[Array, "2"] | None = None

    def exact(self) -> list[Exact]:
        """Return the exact entries of `inner` and, overriding them, the zeros."""
        zeros = Exact(
            jax.tree.map(lambda _: 0.0, self.mask), jax.tree.map(jnp.logical_not, self.mask)
        )
        return [*exact_entries(self.inner_state), zeros]


def check_places_nothing(inner_state: Any) -> None:
    """Raise if `inner` sets exact params, which zeros would overwrite."""
    if placing_states(inner_state):
        raise ValueError(
            "inner sets exact params (as sgperm does), but zeros would overwrite them: use another "
            "optimizer."
        )


def make_masks(params: Any) -> Any:
    """Make a mask of True for each leaf."""
    return jax.tree.map(lambda leaf: place_like(jnp.ones_like(leaf, bool), leaf), params)


def zero_dead(mask: Any, tree: Any) -> Any:
    """Return the tree with each dead entry replaced by 0."""

    # Use a selection instead of a product, since 0 * NaN is NaN
    def zero_leaf(m: Any, leaf: Any) -> Any:
        return leaf if is_masked(m) else jnp.where(m, leaf, jnp.zeros([], leaf.dtype))

    return jax.tree.map(zero_leaf, mask, tree, is_leaf=is_masked)


def mask_updates(mask: Any, updates: Any, params: Any, before: Any = None) -> Any:
    """Return updates that move live entries and set the other entries to exactly 0.0.

    Args:
      mask: Whether each entry is live after this step.
      updates: The updates of live entries.
      params: The params before this step.
      before: Whether each entry was live before; None for `mask`. An entry that becomes live starts at
        0, for any old value.
    """

    # w + u where m, from 0 where w was not live, else w + (-w), which is +0.0 in every dtype
    def mask_leaf(m: Any, u: Any, w: Any, was_live: Any) -> Any:
        if is_masked(m):
            return u
        u = jnp.asarray(u, w.dtype)
        return jnp.where(m, jnp.where(was_live, u, u - w), -w)

    before = mask if before is None else before
    return jax.tree.map(mask_leaf, mask, updates, params, before, is_leaf=is_masked)
