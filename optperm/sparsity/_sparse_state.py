"""The state of wrappers that train sparse networks, and updates that reach zero exactly."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core.dtypes import place_like
from optperm.core.fingerprints import UNSET
from optperm.core.shapes import Array, Bool, Float32, Int32, PyTree, UInt32
from optperm.core.shardings import can_be_seen
from optperm.core.states import local_values
from optperm.core.trees import is_masked, leaf_paths, without_variables
from optperm.exact import Exact, exact_entries, placing_states
from optperm.sparsity._choice import Include, find_axes, resolve_include
from optperm.sparsity._structures import Structure

_LOWERED = (
    "prune_gradually has made more zeros than sparsity asks for now, and masks only shrink. Pass the "
    "earlier sparsity=, or free all entries with optperm.sparsity.reset_masks."
)


class ZeroCounts(NamedTuple):
    """Numbers of zero units in each layer, or in all leaves together, as `prune_gradually` ranks them.

    Attributes:
      asked: The final numbers.
      found: The numbers after the last multiple of `every`, at most the final numbers.
      aimed: The maximum of the numbers that the ramp has asked for.
    """

    asked: Int32[Array, "layers"]
    found: Int32[Array, "layers"]
    aimed: Int32[Array, "layers"]


class SparseState(NamedTuple):
    """State of `prune_gradually` and of `rigl`.

    Attributes:
      count: Number of steps taken.
      mask: Whether each entry is live; `optax.MaskedNode` for a leaf that is not included.
      inner_state: State of `inner`.
      scores: S of the criterion "movement", a tree like the mask; None for the other criteria.
      zeros: Numbers of zeros of `prune_gradually`; None for `rigl`.
      key: The raw data of the key of `rigl`; None for `prune_gradually`.
      unmoved: 1 until `rigl` moves the mask for the first time, if `drop_fraction` is not 0, otherwise
        0; None for `prune_gradually`.
      fingerprint: A number for each of the arguments `shaped_by()`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mask: PyTree[Bool[Array, "..."]]
    inner_state: Any
    scores: PyTree[Float32[Array, "..."]] | None = None
    zeros: ZeroCounts | None = None
    key: UInt32[Array, "2"] | None = None
    unmoved: Int32[Array, ""] | None = None
    fingerprint: UInt32[Array, "arguments"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments that determine what the state means."""
        return ("axes", "criterion", "include", "scope", "sparsity", "structure")

    def exact(self) -> list[Exact]:
        """Return the exact entries of `inner` and, overriding them, the zeros."""
        zeros = Exact(
            jax.tree.map(lambda _: 0.0, self.mask), jax.tree.map(jnp.logical_not, self.mask)
        )
        return [*exact_entries(self.inner_state), zeros]

    def reached_goal(self) -> jax.Array:
        """Return whether the params are as sparse as asked for, a boolean for each replica."""
        # The params of rigl are dense until its first step.
        count, zeros = without_variables((self.count, self.zeros))
        if zeros is None:
            return count > 0
        asked, found, aimed = zeros
        return jnp.all((found >= asked) & (aimed <= asked), axis=-1) & (count > 0)

    def warnings(self, params: Any) -> list[str]:
        """Return sentences if the zeros or the mask are not what the arguments ask for.

        Args:
          params: Not used.
        """
        del params
        state = without_variables(self)
        seen = state.count, state.mask, state.zeros, state.unmoved
        if not all(map(can_be_seen, jax.tree.leaves(seen))) or not np.any(
            local_values(state.count)
        ):
            return []
        return _judge_mask(state) if state.zeros is None else _judge_zeros(state)


def _judge_mask(state: SparseState) -> list[str]:
    """Return a sentence if the mask of `rigl` has not moved."""
    is_dense = all(np.all(local_values(jnp.all(m))) for m in jax.tree.leaves(state.mask))
    if not np.any(local_values(state.unmoved)) or is_dense:
        return []
    return [
        "The mask of rigl has not moved. It moves in steps that are multiples of every and below end, "
        "if gradients are finite, and the gradients of masked weights are not 0. Take a smaller every, "
        "do not mask weights in the model, or pass drop_fraction=0 for a fixed mask."
    ]


def _judge_zeros(state: SparseState) -> list[str]:
    """Return a sentence for each difference between the zeros and the arguments of `prune_gradually`."""
    asked, found, aimed = map(local_values, state.zeros or ())
    said = []
    if np.any(found < asked):
        said.append(
            "prune_gradually has made fewer zeros than sparsity asks for: the ramp must be 1 in a step "
            "that is a multiple of every, with scores that are finite and not all 0. Let the ramp end "
            "at 1 and earlier, or take a smaller every."
        )
    if np.any(aimed > asked):
        said.append(_LOWERED)
    # With scope="global", all leaves are one group.
    masks = jax.tree.leaves(state.mask)
    if asked.shape[-1] == 1 and len(masks) > 1:
        removed = find_removed(state.mask, np.ndim(state.count))
        said += [describe_removed(removed)] if removed and len(removed) < len(masks) else []
    return said


def find_removed(mask: Any, num_stacked: int = 0) -> list[str]:
    """Return the paths of the leaves without a live entry, in any replica of a stacked mask."""

    def is_removed(m: jax.Array) -> bool:
        has_live = jnp.any(m, axis=tuple(range(num_stacked, m.ndim)))
        return bool(m.size) and not np.all(local_values(has_live))

    return [path or "params" for path, m in leaf_paths(mask) if is_removed(m)]


def find_removed_layers(mask: Any, known: Any) -> list[str]:
    """Return the paths of the layers without a live entry, such as "kernel[2]" of a stack."""
    found = []
    for (path, m), own in zip(leaf_paths(mask), jax.tree.leaves(known), strict=True):
        inside = tuple(axis for axis in range(m.ndim) if axis not in own.batch_axis)
        removed = ~local_values(jnp.any(m, axis=inside)) & (m.size > 0)
        name = path or "params"
        found += [
            f"{name}{[*map(int, at)]}" if own.batch_axis else name for at in np.argwhere(removed)
        ]
    return found


def describe_removed(paths: list[str]) -> str:
    """Return a sentence about leaves whose entries are all zero."""
    return (
        f"With scope='global', all weights of {', '.join(paths)} are zero, because they are small "
        "compared with the other leaves. Use scope='erk' or 'leaf', or exclude leaves with include=."
    )


def check_not_lowered(zeros: ZeroCounts, asked: jax.Array) -> None:
    """Raise, outside `jax.jit`, if the masks cannot reach the numbers of zeros that are asked for."""
    if all(map(can_be_seen, (zeros.aimed, asked))) and np.any(
        local_values(zeros.aimed) > local_values(asked)
    ):
        raise ValueError(_LOWERED)


def sparse_arguments(
    include: Include | None,
    axes: Any,
    params: Any,
    *,
    criterion: str | None = None,
    scope: str = "erk",
    sparsity: Any = None,
    structure: Structure | None = None,
) -> dict[str, Any]:
    """Return the arguments that shape a `SparseState`.

    Args:
      include: As in `include_leaves`.
      axes: As in `include_leaves`.
      params: The params.
      criterion: The criterion of `prune_gradually`; None for `rigl`.
      scope: The scope.
      sparsity: The numbers of zeros of `rigl`, whose masks keep these numbers; None for
        `prune_gradually`, whose masks follow the argument.
      structure: The structure.
    """
    known = find_axes(axes, params)
    # Other axes also change the leaves that are included and their numbers of zeros, so they come first.
    return {
        "axes": [
            (own.kind == "kernel", own.in_axis, own.out_axis, own.batch_axis)
            for own in jax.tree.leaves(known)
        ],
        "criterion": criterion,
        "include": jax.tree.leaves(resolve_include(include, known, params)),
        "scope": scope,
        "sparsity": sparsity,
        "structure": structure,
    }


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
