"""Apply updates so that entries that a method sets, fixes or keeps at zero are exact.

In floating point, `p + (q - p)` differs from `q` for about a third of all float32 pairs. If a method
determines exact entries of the params, the method `exact()` of its state returns these entries for
`apply_updates`.
"""

import collections
import functools
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.mapped_axes import stack_scalars
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.states import find_states, has_protocol
from optperm.core.trees import fill_masked, is_masked, mask_like, trained_part, without_variables

# Wrappers that average, interpolate or scale the params of the method inside.
_MOVING_WRAPPERS = {
    "optax.contrib.schedule_free": optax.contrib.ScheduleFreeState,
    "optax.contrib.mechanize": optax.contrib.MechanicState,
    "optax.lookahead": optax.LookaheadState,
}
# An optimizer that adds updates to params misses a target by a few rounding errors of the target.
_ROUNDINGS = 16
_STATE = (
    "the optimizer state (optax.flatten and split_real_and_imaginary around a method that sets exact "
    "params need optax.apply_updates)"
)


class Exact(NamedTuple):
    """Entries of the params that have exact values after the last step.

    Attributes:
      values: The values, a tree like `where` of arrays or numbers; None for the values before the step.
      where: The exact entries, a tree like params of booleans that broadcast against the leaves from the
        left; `optax.MaskedNode` for a leaf, or a part of the tree, without exact entries.
      is_target: Whether the updates lead to the values, which may be from an earlier step. Other exact
        entries override targets.
    """

    values: Any
    where: Any
    is_target: bool = False

    def only_if(self, flag: Any) -> "Exact":
        """Return these entries where a flag is True.

        Args:
          flag: A bool array, with as many leading axes as the entries have axes of replicas.
        """
        return self._replace(where=jax.tree.map(lambda w: _both(flag, w), self.where))

    def put(self, moved: Any, before: Any, updates: Any) -> Any:
        """Return moved params with the exact values, of targets only where the updates lead to them.

        Args:
          moved: The params plus the updates.
          before: The params before the step, with the same tree structure.
          updates: The updates.
        """

        def put_leaf(where: Any, value: Any, leaf: Any, start: Any, update: Any) -> Any:
            if is_masked(where):
                return leaf
            if self.is_target:
                return _put_target(where, value, leaf, start, update)
            value = jnp.asarray(value, jnp.result_type(leaf))
            return jnp.where(_align(where, leaf), value, leaf)

        values = mask_like(before, self.where) if self.values is None else self.values
        trees = self.where, values, moved, before, updates
        return jax.tree.map(put_leaf, *trees, is_leaf=is_masked)


@jax.jit  # Leaves of the same shape are traced once.
def _put_target(where: Any, value: Any, leaf: Any, start: Any, update: Any) -> jax.Array:
    """Return a leaf, with targets for the entries whose updates lead to the targets."""
    value = jnp.asarray(value, jnp.result_type(leaf))
    where = _both(where, _leads_to(value, start, update))
    return jnp.where(_align(where, leaf), value, leaf)


def _both(flag: Any, where: Any) -> Any:
    """Return the conjunction of two flags; the flag with fewer axes has only leading axes."""
    if flag is True or where is True:
        return where if flag is True else flag
    flag, where = jnp.asarray(flag), jnp.asarray(where)
    return jnp.logical_and(_align(flag, where), _align(where, flag))


def _align(flag: Any, other: Any) -> jax.Array:
    """Return a flag with trailing axes of length 1, so that it broadcasts against another array."""
    return jnp.expand_dims(flag, range(jnp.ndim(flag), max(jnp.ndim(flag), jnp.ndim(other))))


class ExactState(Protocol):
    """A state of a transformation that determines exact values of entries of the params."""

    def exact(self) -> list[Exact]:
        """Return the exact entries after the last step; later entries override earlier entries.

        The state of a wrapper also returns the exact entries of the states inside it.
        """
        ...


class PlacingState(ExactState, Protocol):
    """A state whose targets may be replaced by another state's targets, for params at these targets."""

    def replace_targets(self, other: Self) -> Self:
        """Return this state with the targets of another state."""
        ...


class CommittingState(Protocol):
    """A state of a method that commits without a step if `update` gets `commit="only"`."""

    def steps_since_commit(self) -> jax.Array:
        """Return the number of local steps that the center does not include yet."""
        ...


def only_commits(new: Any, old: Any) -> Any:
    """Return an old state with the new states of methods that commit; other methods took no step."""
    return jax.tree.map(
        lambda before, after: after if has_protocol(before, CommittingState) else before,
        old,
        new,
        is_leaf=lambda node: has_protocol(node, CommittingState),
    )


# States of Optax whose updates lead to params in the state, not to a step from the current params.
OWN_POINTS: tuple[Any, ...] = (
    optax.contrib.ScheduleFreeState,
    optax.contrib.MechanicState,
    optax.contrib.MadgradState,
    optax.contrib.COCOBState,
)


def exact_entries(opt_state: Any) -> list[Exact]:
    """Return the exact entries of all states, in any nesting, with targets first, to be overridden."""
    found = [each for state in find_states(opt_state, ExactState) for each in state.exact()]
    return sorted(found, key=lambda each: not each.is_target)


def placing_states(opt_state: Any) -> list[PlacingState]:
    """Return the states, in any nesting, that set exact params in some step."""
    return [state for state in find_states(opt_state, PlacingState) if _is_placing(state)]


def _is_placing(node: Any) -> bool:
    return has_protocol(node, PlacingState) and any(each.is_target for each in node.exact())


def replace_targets(opt_state: Any, other: Any) -> Any:
    """Return an optimizer state whose parts that set exact params have the targets of another state.

    Args:
      opt_state: The state of an optimizer, in any nesting.
      other: A state whose parts that set exact params have the same types, in the same order.
    """
    targets = iter(placing_states(other))
    return jax.tree.map(
        lambda node: node.replace_targets(next(targets)) if _is_placing(node) else node,
        opt_state,
        is_leaf=_is_placing,
    )


def apply_updates(params: Params, updates: Updates, opt_state: Any) -> Params:
    """Apply updates to params, and give exact values to weights that a method sets.

    An ordinary leaf becomes `params + updates`, as in `optax.apply_updates`. A leaf that a method such
    as `optperm.sgperm` sets becomes the exact target in `opt_state`. An entry that
    `optperm.mask_elements` masks keeps its bits, for any target. An entry that `optperm.prune_gradually`
    or `optperm.rigl` keeps at zero becomes 0.0, never -0.0.

    Args:
      params: A tree of params, or a model made of dataclasses, as in Equinox.
      updates: A tree of updates with the same structure and shapes; None for leaves without training.
      opt_state: The optimizer state that `update` returned with `updates`, in any nesting.

    Returns:
      The new params, with the structure, shapes and dtypes of `params`.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"kernel": jnp.array([[0.1], [0.2], [0.3]])}
      >>> tx = optperm.sgperm(aggressiveness=0.5)
      >>> opt_state = tx.init(params)
      >>> grads = {"kernel": jnp.array([[-1.0], [1.0], [0.0]])}
      >>> updates, opt_state = tx.update(grads, opt_state, params)
      >>> optperm.apply_updates(params, updates, opt_state)["kernel"].ravel().tolist()
      [0.20000000298023224, 0.10000000149011612, 0.30000001192092896]

    Notes:
      A target is applied if and only if the update leads to the target, up to rounding. Between the
      updates of the method, a wrapper such as `optax.contrib.sam` returns its own updates, which are
      applied as they are. The same holds if a transformation after the method changes the updates. The
      params are then not at the targets: `mismatches` in the state of `optperm.sgperm`,
      `optperm.laperm` or `optperm.dldr` counts this, and `optperm.training.fit` warns.

    Raises:
      TypeError: If a leaf is not an array.
      ValueError: If the trees do not match, two methods in `opt_state` set the same leaf, or a method
        with exact entries is inside `optax.lookahead`, `optax.contrib.schedule_free` or
        `optax.contrib.mechanize`, which keep their own params without these entries.
    """
    # States contain plain arrays, while params may contain variables of flax.nnx.
    whole, params = params, trained_part(params)
    params = params if params is whole else _select_updated(params, updates)
    before, moves = without_variables(params), without_variables(updates)
    checks.check_same_tree("updates", moves, before, source="params", dtypes=False)
    entries = exact_entries(opt_state)
    _check_wrappers(opt_state)
    _check_disjoint(opt_state)
    moved = without_variables(optax.apply_updates(params, updates))
    for each in entries:
        like = each.values if each.is_target else each.where
        checks.check_same_tree(
            "params", mask_like(before, each.where), like, source=_STATE, dtypes=False
        )
        moved = each.put(moved, before, moves)
    moved = jax.tree.unflatten(jax.tree.structure(params), jax.tree.leaves(moved))
    return moved if params is whole else fill_masked(moved, whole)


def count_mismatches(count: jax.Array, params: Params, targets: Params) -> jax.Array:
    """Return the count, plus one if the params are not at the targets of the last step.

    Args:
      count: The number of such steps so far.
      params: The params at the start of a step. Scalars do not count.
      targets: The values that the last step gave them.
    """
    return jnp.where(_are_elsewhere(params, targets), optax.safe_increment(count), count)


def mismatch_warnings(method: str, count: Any) -> list[str]:
    """Return a sentence if steps began at params that a method had not set.

    The sentence has no number, so that a loop that says each sentence once says it once.
    """
    if not can_be_seen(count) or not np.any(np.asarray(count)):
        return []
    return [
        f"Steps began at params that {method} had not set (mismatches in its state counts them): a "
        "transformation after it or a wrapper changed its updates, or the params were reset without "
        f"the state. Put {method} last in its chain, or give the other transformation other params "
        "(optax.partition)."
    ]


def _are_elsewhere(params: Params, targets: Params) -> jax.Array:
    """Return whether params differ from targets by more than the rounding of a step."""
    measured = collections.defaultdict[Any, list[tuple[jax.Array, jax.Array]]](list)
    for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(targets), strict=True):
        if jnp.ndim(q):
            measured[jnp.result_type(q)].append(_measure(p, q))
    found = []
    # The numbers of all leaves are compared at once, since each leaf's own comparison is a kernel.
    for dtype, pairs in measured.items():
        largest, distance = (stack_scalars(column) for column in zip(*pairs, strict=True))
        # Leaves with infinite or NaN targets are not checked, since distances from them are NaN.
        is_near = distance <= _ROUNDINGS * jnp.finfo(dtype).eps.astype(largest.dtype) * largest
        found.append(jnp.any(jnp.isfinite(largest) & ~is_near))
    return functools.reduce(jnp.logical_or, found, jnp.zeros([], jnp.bool_))


@jax.jit  # Leaves of the same shape are traced once.
def _measure(p: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return max |q| and max |p - q|."""
    wide = accumulation_dtype(q)
    largest = jnp.max(jnp.abs(q), initial=0.0).astype(wide)
    return largest, jnp.max(jnp.abs(p.astype(wide) - q.astype(wide)), initial=0.0)


def check_no_averages(opt_state: Any, method: str) -> None:
    """Raise if a state contains params other than the params that a method keeps exact."""
    for name, state_type in _MOVING_WRAPPERS.items():
        if find_states(opt_state, state_type):
            raise ValueError(
                f"{name} inside {method} stores its own params, and {method} cannot keep these "
                "params exact. Use another optimizer."
            )


def _check_wrappers(opt_state: Any) -> None:
    """Raise if a wrapper of Optax moves the params away from the exact entries of a method inside it."""
    for name, state_type in _MOVING_WRAPPERS.items():
        if any(map(exact_entries, find_states(opt_state, state_type))):
            raise ValueError(
                f"{name} may not wrap a method that sets exact params, such as zeros, because {name} "
                f"stores params without these exact values. Use the method without {name}."
            )


def _check_disjoint(opt_state: Any) -> None:
    """Raise if two states set the same leaf."""
    taken: set[Any] = set()
    for state in placing_states(opt_state):
        targets = [each.where for each in state.exact() if each.is_target]
        own = {path for tree in targets for path, _ in jax.tree_util.tree_leaves_with_path(tree)}
        if own & taken:
            raise ValueError(
                "Two methods set the same parameter: give them different params with optax.partition."
            )
        taken |= own


def _select_updated(params: Any, updates: Any) -> Any:
    """Return a model with None for leaves whose update is None, because they are not trained."""

    def is_none(node: Any) -> bool:
        return node is None

    try:
        return jax.tree.map(lambda u, p: None if u is None else p, updates, params, is_leaf=is_none)
    except ValueError:  # the trees do not match, which `check_same_tree` reports
        return params


def _leads_to(target: jax.Array, before: Any, update: Any) -> jax.Array:
    """Return whether an update leads to a target, for each entry.

    In steps without a call of the method, a wrapper such as `optax.contrib.sam` returns its own updates,
    while the targets in the state are from an earlier step.
    """
    p = jnp.asarray(before, target.dtype)
    wide, limits = accumulation_dtype(target), jnp.finfo(target.dtype)
    q, u, step = (jnp.asarray(x).astype(wide) for x in (target, update, target - p))
    # |u - (q - p)| <= eps (|q| + |q - p|), since a compiler may have computed u from a more exact q.
    tolerance = limits.eps.astype(wide) * (jnp.abs(q) + jnp.abs(step)) + limits.tiny.astype(wide)
    agrees = jnp.abs(u - step) <= tolerance
    # If q - p overflows in the dtype, the update u also overflows.
    largest = limits.max.astype(wide)
    return jnp.where(jnp.abs(step) <= largest, agrees, ~(jnp.abs(u) <= largest))
