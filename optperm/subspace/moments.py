"""Carry moments of Optax's transformations over from one basis to the next."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from optperm.subspace.matrices import Matrix
from optperm.subspace.projections import rotate

Decays = tuple[float, float] | None


class Change(NamedTuple):
    """A change of the basis of a leaf's matrices.

    Attributes:
      matrix: The view of the leaf as matrices.
      old: The basis before the change, (..., d, r).
      new: The basis after the change.
      is_new: Whether each matrix has another basis, (...).
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


def _carry_mean(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """Return C M."""
    return (change.rotate(moment),)


def _carry_squares(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """Return (C * C) V, of squares of entries whose mean is unknown."""
    return (change.rotate_squares(moment),)


def _carry_adam(
    change: Change, mu: jax.Array, nu: jax.Array, *, count: jax.Array, decays: Decays
) -> tuple[jax.Array, ...]:
    """Return C M, and c2 |(C * C)(V / c2 - (M / c1)^2) + (C M / c1)^2|, as LDAdam does."""
    # c_i = 1 - b_i^t, the bias corrections; before the first step there is nothing to carry.
    t = jnp.maximum(count, 1).astype(nu.dtype)
    c1, c2 = (1 - jnp.asarray(b, nu.dtype) ** t for b in decays or (0.0, 0.0))
    # Squares have no coordinates: the variance V / c2 - (M / c1)^2 is rotated as if entries were
    # uncorrelated, and the square of the rotated mean is added again.
    mean = change.rotate(mu)
    variance = change.rotate_squares(nu / c2 - jnp.square(mu / c1))
    return mean, c2 * jnp.abs(variance + jnp.square(mean / c1))


# For each type of state the fields of its moments, and the function that carries the moments of a leaf.
_KNOWN: dict[type, tuple[tuple[str, ...], Callable[..., tuple[jax.Array, ...]]]] = {
    optax.ScaleByAdamState: (("mu", "nu"), _carry_adam),
    optax.ScaleByLionState: (("mu",), _carry_mean),
    optax.EmaState: (("ema",), _carry_mean),
    optax.TraceState: (("trace",), _carry_mean),
    optax.contrib.MuonState: (("mu",), _carry_mean),
    optax.ScaleByRmsState: (("nu",), _carry_squares),
}


def _is_known(node: Any) -> bool:
    return type(node) in _KNOWN


def _find_known_states(inner_state: Any) -> list[Any]:
    return list(filter(_is_known, jax.tree.leaves(inner_state, is_leaf=_is_known)))


def split_moments(inner_state: Any, treedef: Any) -> list[list[tuple[Any, ...]]]:
    """Return for each leaf of params its moments in each known state of an optimizer's state."""
    states = [
        [treedef.flatten_up_to(getattr(state, name)) for name in _KNOWN[type(state)][0]]
        for state in _find_known_states(inner_state)
    ]
    return [
        [tuple(tree[i] for tree in trees) for trees in states] for i in range(treedef.num_leaves)
    ]


def join_moments(inner_state: Any, treedef: Any, moments: list[list[tuple[Any, ...]]]) -> Any:
    """Return an optimizer's state with the moments of each leaf, as `split_moments` returns them."""
    states = zip(*moments, strict=True)

    def join(node: Any) -> Any:
        if not _is_known(node) or not moments:
            return node
        trees = map(treedef.unflatten, zip(*next(states), strict=True))
        return node._replace(**dict(zip(_KNOWN[type(node)][0], trees, strict=True)))

    return jax.tree.map(join, inner_state, is_leaf=_is_known)


def carry_moments(
    inner_state: Any, change: Change, moments: list[tuple[Any, ...]], *, decays: Decays
) -> list[tuple[Any, ...]]:
    """Return a leaf's moments in the coordinates of new bases.

    Args:
      inner_state: The optimizer's state.
      change: The change of the leaf's bases.
      moments: The leaf's moments in each known state, (..., r, k) in the orientation of the leaf.
      decays: The decays of Adam's moments, for its bias corrections; None for no corrections.
    """
    where = change.is_new[..., None, None]

    def carry(state: Any, each: tuple[Any, ...]) -> tuple[Any, ...]:
        if not all(isinstance(leaf, jax.Array) for leaf in each):  # masked within inner
            return each
        formula = _KNOWN[type(state)][1]
        if formula is _carry_adam:
            formula = functools.partial(_carry_adam, count=state.count, decays=decays)
        # Rotated as (..., r, k) in the dtype of the basis, and kept where the basis has not changed
        low = [change.matrix.turn(leaf).astype(change.new.dtype) for leaf in each]
        return tuple(
            jnp.where(where, change.matrix.turn(new).astype(leaf.dtype), leaf)
            for new, leaf in zip(formula(change, *low), each, strict=True)
        )

    return list(map(carry, _find_known_states(inner_state), moments))


def check_moments(inner_state: Any, matrices: Sequence[Matrix | None], lows: Sequence[Any]) -> None:
    """Raise a ValueError that names the first state whose moments cannot be carried over."""
    shapes = {low.shape for matrix, low in zip(matrices, lows, strict=True) if matrix is not None}
    # One number for each basis vector, as in a factored second moment
    shapes |= {(*matrix.batch_shape, matrix.rank) for matrix in matrices if matrix is not None}
    if unknown := _find_unknown_state(inner_state, shapes):
        raise ValueError(
            f"inner keeps a {unknown}, which cannot be carried over: pass carry=False."
        )


def _find_unknown_state(
    node: Any, shapes: set[tuple[int, ...]], owner: str = "state"
) -> str | None:
    """Return the name of the first state with an array of these shapes that cannot be carried over."""
    if _is_known(node):
        return None
    if not isinstance(node, dict | tuple | list):
        return owner if getattr(node, "shape", None) in shapes else None
    owner = type(node).__name__ if hasattr(node, "_fields") else owner
    children = node.values() if isinstance(node, dict) else node
    found = (_find_unknown_state(child, shapes, owner) for child in children)
    return next(filter(None, found), None)
