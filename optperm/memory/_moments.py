"""Carry the moments of Optax's transformations over from one basis to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from optperm.core.states import Match, find_states, has_protocol, match_params
from optperm.core.trees import is_masked, mask_like
from optperm.memory._matrices import Matrix, list_matrices
from optperm.memory._projections import rotate
from optperm.memory._register_moments import KNOWN, RmsWithCount


class Change(NamedTuple):
    """A change of the basis of a leaf's matrices.

    Attributes:
      matrix: The view of the leaf as matrices.
      old: The basis before the change, (..., d, r).
      new: The basis after the change.
      is_new: Whether each matrix has a new basis, (...).
    """

    matrix: Matrix
    old: jax.Array
    new: jax.Array
    is_new: jax.Array

    def rotate(self, moment: jax.Array) -> jax.Array:
        r"""Return :math:`C M`, with :math:`C = P_{new}^\top P_{old}`."""
        return rotate(self.new, self.old, moment)

    def rotate_squares(self, moment: jax.Array) -> jax.Array:
        r"""Return :math:`(C \circ C) V`."""
        return rotate(self.new, self.old, moment, squared=True)


def _carry_means(change: Change, *moments: jax.Array) -> tuple[jax.Array, ...]:
    """Return C M for each M."""
    return tuple(map(change.rotate, moments))


def _carry_squares(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """Return (C * C) V for squares of entries whose mean is unknown."""
    return (change.rotate_squares(moment),)


def _carry_adam(
    change: Change,
    mu: jax.Array,
    nu: jax.Array,
    *,
    count: jax.Array,
    b1: float | jax.Array,
    b2: float | jax.Array,
) -> tuple[jax.Array, ...]:
    """Return C M, and c2 |(C * C)(V / c2 - (M / c1)^2) + (C M / c1)^2|, as LDAdam does."""
    # c_i = 1 - b_i^t are the bias corrections; moments are zero before the first step.
    t = jnp.maximum(count, 1).astype(nu.dtype)
    c1, c2 = (1 - jnp.asarray(b, nu.dtype) ** t for b in (b1, b2))
    # Squares cannot be rotated: the variance V / c2 - (M / c1)^2 is rotated as if entries were
    # uncorrelated, and then the square of the rotated mean is added.
    mean = change.rotate(mu)
    variance = change.rotate_squares(nu / c2 - jnp.square(mu / c1))
    return mean, c2 * jnp.abs(variance + jnp.square(mean / c1))


# A function from a change of a leaf's basis and the leaf's moments, (..., r, k), to the new moments
Formula = Callable[..., tuple[jax.Array, ...]]
# The function for states with other moments than means
_CARRIED: dict[type, Formula] = {
    optax.ScaleByAdamState: _carry_adam,
    optax.ScaleByRmsState: _carry_squares,
    RmsWithCount: _carry_squares,
}


def _is_carried(node: Any) -> bool:
    """Return whether a node is a state whose moments can be carried over."""
    roles = KNOWN.get(type(node), {}).values()
    return type(node) in _CARRIED or (bool(roles) and set(roles) <= {"mean", "matrix"})


def match_others(inner_state: Any, params: Any, is_own: Callable[[Any], bool]) -> list[Match]:
    """Return the arrays outside the states for which `is_own` is true, with their params."""
    others = jax.tree.map(lambda node: None if is_own(node) else node, inner_state, is_leaf=is_own)
    return match_params(others, params)


def find_carried_states(inner_state: Any) -> list[Any]:
    """Return the states whose moments can be carried over, in the order of the tree."""
    return list(filter(_is_carried, jax.tree.leaves(inner_state, is_leaf=_is_carried)))


def split_moments(inner_state: Any, treedef: Any) -> list[list[tuple[Any, ...]]]:
    """Return, for each leaf of params, its moments in each known state within an optimizer's state.

    If a state does not contain a leaf, `optax.MaskedNode` replaces the leaf's moments.
    """
    places = treedef.unflatten(range(treedef.num_leaves))

    def split(moments: Any) -> list[Any]:
        found: list[Any] = [optax.MaskedNode()] * treedef.num_leaves
        own = jax.tree.leaves(mask_like(places, moments))
        for index, moment in zip(own, jax.tree.leaves(moments), strict=True):
            found[index] = moment
        return found

    states = [
        [split(getattr(state, name)) for name in KNOWN[type(state)]]
        for state in find_carried_states(inner_state)
    ]
    return [
        [tuple(tree[i] for tree in trees) for trees in states] for i in range(treedef.num_leaves)
    ]


def join_moments(inner_state: Any, moments: list[list[tuple[Any, ...]]]) -> Any:
    """Return an optimizer's state with the given moments, in the form of `split_moments`."""
    states = zip(*moments, strict=True)

    def join(node: Any) -> Any:
        if not _is_carried(node) or not moments:
            return node
        fields = zip(KNOWN[type(node)], zip(*next(states), strict=True), strict=True)
        return node._replace(**{name: join_field(getattr(node, name), new) for name, new in fields})

    def join_field(old: Any, new: tuple[Any, ...]) -> Any:
        seen = [moment for moment in new if not is_masked(moment)]
        return jax.tree.unflatten(jax.tree.structure(old), seen)

    return jax.tree.map(join, inner_state, is_leaf=_is_carried)


def find_formulas(
    inner_state: Any, *, b1: float | jax.Array, b2: float | jax.Array
) -> list[Formula]:
    """Return the formula for each state whose moments can be carried over.

    Args:
      inner_state: The optimizer's state.
      b1: The decay rate of Adam's first moments, for its bias correction; 0 for no correction.
      b2: The decay rate of Adam's second moments.
    """
    formulas: list[Formula] = []
    for state in find_carried_states(inner_state):
        formula = _CARRIED.get(type(state), _carry_means)
        if formula is _carry_adam:
            formula = functools.partial(_carry_adam, count=state.count, b1=b1, b2=b2)
        formulas.append(formula)
    return formulas


def carry_moments(
    formulas: Sequence[Formula], change: Change, moments: list[tuple[Any, ...]]
) -> list[tuple[Any, ...]]:
    """Return a leaf's moments in the coordinates of new bases.

    Args:
      formulas: The formula of each state, from `find_formulas`.
      change: The change of the leaf's bases.
      moments: The leaf's moments in each state, (..., r, k) in the orientation of the leaf.
    """
    where = change.is_new[..., None, None]

    def carry(formula: Formula, each: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(map(is_masked, each)):  # within inner
            return each
        # Rotate moments as (..., r, k) in the dtype of the basis; keep those whose basis did not change
        low = [change.matrix.turn(leaf).astype(change.new.dtype) for leaf in each]
        return tuple(
            jnp.where(where, change.matrix.turn(new).astype(leaf.dtype), leaf)
            for new, leaf in zip(formula(change, *low), each, strict=True)
        )

    return list(map(carry, formulas, moments))


def check_moments(inner_state: Any, plans: Any, low: Any) -> None:
    """Raise a ValueError that names the first state whose moments cannot be carried over."""
    _check_codes(inner_state, plans, low)
    unknown = _find_unlike_params(inner_state, plans, low)
    unknown = unknown or _find_unknown_state(inner_state, plans, low)
    if unknown:
        raise ValueError(
            f"inner contains the state {unknown}, which cannot be carried over: pass carry=False."
        )


class CodedState(Protocol):
    """A state of a wrapper that stores codes in the places of another state's moments."""

    def decode(self) -> Any:
        """Return the other state, with its moments."""
        ...


def decode_states(opt_state: Any) -> Any:
    """Return an optimizer's state with the decoded state in place of each state with codes."""

    def is_coded(node: Any) -> bool:
        return has_protocol(node, CodedState)

    return jax.tree.map(
        lambda node: node.decode() if is_coded(node) else node, opt_state, is_leaf=is_coded
    )


def _check_codes(inner_state: Any, plans: Any, low: Any) -> None:
    """Raise if a state within an optimizer has codes for leaves whose moments are carried over."""
    matrices = list_matrices(plans, low)
    for state in find_states(inner_state, CodedState):
        places = [each.place for each in match_params(state, low)]
        if any(place is not None and matrices[place] is not None for place in places):
            raise ValueError(
                f"inner contains a {type(state).__name__}, whose codes cannot be carried over to a new "
                "basis: put its transformation around low_rank, as quantize_state(low_rank(...)), or "
                "pass carry=False."
            )


def _find_unlike_params(inner_state: Any, plans: Any, low: Any) -> str | None:
    """Return the first known state with moments that are not like low-rank leaves.

    Moments of leaves at full rank are not carried over, so they may have any shape.
    """
    lows, matrices = jax.tree.leaves(low), list_matrices(plans, low)
    for state in find_carried_states(inner_state):
        for name in KNOWN[type(state)]:
            for moment, place, _ in match_params(getattr(state, name), low):
                is_full = place is not None and matrices[place] is None
                if not is_full and (place is None or moment.shape != jnp.shape(lows[place])):
                    return f"{type(state).__name__} whose {name} is not like params"
    return None


def _find_unknown_state(inner_state: Any, plans: Any, low: Any) -> str | None:
    """Return the first unknown state with an array that may depend on the basis.

    Arrays of leaves at full rank do not depend on it, and neither do single numbers and integers.
    """
    lows, matrices = jax.tree.leaves(low), list_matrices(plans, low)
    shapes = {leaf.shape for leaf, m in zip(lows, matrices, strict=True) if m is not None}
    # An array may have one number per basis vector, such as a factored second moment
    shapes |= {(*m.batch_shape, m.rank) for m in matrices if m is not None}
    for leaf, place, owner in match_others(inner_state, low, _is_carried):
        is_full = place is not None and matrices[place] is None
        is_array = leaf.size > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if shapes and not is_full and (is_array or leaf.shape in shapes):
            return owner
    return None
