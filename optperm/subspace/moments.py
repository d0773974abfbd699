"""Moments of Optax's transformations, carried over from one basis to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optperm.contract.mapped_axes import cond
from optperm.subspace.matrices import Matrix
from optperm.subspace.projections import rotate

Decays = tuple[float, float] | None


class Change(NamedTuple):
    """A change of the basis of a leaf's matrices.

    Attributes:
      matrix: How the leaf is projected.
      old: The basis before, (..., d, r).
      new: The one after.
      is_new: Of which matrices it is another one, (...).
    """

    matrix: Matrix
    old: jax.Array
    new: jax.Array
    is_new: jax.Array

    def rotated(self, moment: jax.Array) -> jax.Array:
        r"""Return :math:`C M`, with :math:`C = P_{new}^\top P_{old}`."""
        return rotate(self.new, self.old, moment)

    def squares_rotated(self, moment: jax.Array) -> jax.Array:
        r"""Return :math:`(C \circ C) V`."""
        return rotate(self.new, self.old, moment, squared=True)


def _first(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """M <- C M."""
    return (change.rotated(moment),)


def _second(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """V <- (C * C) V, of squares of entries without a mean."""
    return (change.squares_rotated(moment),)


def _adam(
    change: Change, mu: jax.Array, nu: jax.Array, *, count: jax.Array, decays: Decays
) -> tuple[jax.Array, ...]:
    """M <- C M and V <- c2 |(C * C)(V / c2 - (M / c1)^2) + (C M / c1)^2|, as LDAdam does."""
    # c = 1 - b^t; before the first step there is nothing to carry.
    t = jnp.maximum(count, 1).astype(nu.dtype)
    c1, c2 = (1 - jnp.asarray(b, nu.dtype) ** t for b in decays or (0.0, 0.0))
    mean = change.rotated(mu)
    variance = change.squares_rotated(nu / c2 - jnp.square(mu / c1))
    return mean, c2 * jnp.abs(variance + jnp.square(mean / c1))


# By the type of the state: its trees of moments, and what becomes of those of one leaf.
_KNOWN: dict[type, tuple[tuple[str, ...], Callable[..., tuple[jax.Array, ...]]]] = {
    optax.ScaleByAdamState: (("mu", "nu"), _adam),
    optax.ScaleByLionState: (("mu",), _first),
    optax.EmaState: (("ema",), _first),
    optax.TraceState: (("trace",), _first),
    optax.contrib.MuonState: (("mu",), _first),
    optax.ScaleByRmsState: (("nu",), _second),
}


def _is_known(node: Any) -> bool:
    return type(node) in _KNOWN


def carry_moments(
    inner_state: Any, treedef: Any, changes: Sequence[Change | None], decays: Decays
) -> Any:
    """Return an optimizer's state with its moments in the coordinates of new bases.

    Args:
      inner_state: Its state, over low-rank leaves.
      treedef: The structure of params.
      changes: For each leaf, what has become of its basis; None for leaves at full rank.
      decays: Those of Adam's moments, for its bias corrections, or None to leave those away.
    """

    def carry(state: Any) -> Any:
        if not _is_known(state):
            return state
        names, formula = _KNOWN[type(state)]
        trees = [treedef.flatten_up_to(getattr(state, name)) for name in names]
        if formula is _adam:
            formula = functools.partial(_adam, count=state.count, decays=decays)
        moved = [
            each if change is None else _carried(change, each, formula)
            for change, *each in zip(changes, *trees, strict=True)
        ]
        columns = zip(*moved, strict=True) if moved else ((),) * len(names)
        return state._replace(
            **{n: treedef.unflatten(c) for n, c in zip(names, columns, strict=True)}
        )

    return jax.tree.map(carry, inner_state, is_leaf=_is_known)


def _carried(
    change: Change,
    leaves: list[Any],
    formula: Callable[..., tuple[jax.Array, ...]],
) -> list[Any]:
    """Return one leaf's moments, carried where its basis is another one."""
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):  # masked within inner
        return leaves

    def move() -> list[jax.Array]:
        dtype = change.new.dtype
        low = [change.matrix.turn(leaf).astype(dtype) for leaf in leaves]
        found = formula(change, *low)
        where = change.is_new[..., None, None]
        return [
            jnp.where(where, change.matrix.turn(new).astype(leaf.dtype), leaf)
            for new, leaf in zip(found, leaves, strict=True)
        ]

    return list(cond(jnp.any(change.is_new), move, lambda: leaves))


def check_moments(inner_state: Any, matrices: Sequence[Matrix | None], lows: Sequence[Any]) -> None:
    """Raise a ValueError that names the first state of which nothing is known of how it is carried.

    States that hold nothing of the shape of a projected leaf need nothing.
    """
    shapes = {low.shape for matrix, low in zip(matrices, lows, strict=True) if matrix is not None}

    def check(node: Any, owner: str) -> None:
        if _is_known(node):
            return
        if hasattr(node, "_fields"):
            owner = type(node).__name__
        children = node.values() if isinstance(node, dict) else node
        if isinstance(node, dict | tuple | list):
            for child in children:
                check(child, owner)
        elif getattr(node, "shape", None) in shapes:
            names = ", ".join(each.__name__ for each in _KNOWN)
            raise ValueError(
                f"inner keeps a {owner} of projected leaves, and low_rank does not know how to carry it "
                f"over to a new basis (known are {names}): pass carry=False to keep it as it is."
            )

    check(inner_state, type(inner_state).__name__)
