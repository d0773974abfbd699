"""Carry moments of Optax's transformations over from one basis to the next."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from optperm.core.states import is_masked, mask_like, match_params
from optperm.memory._matrices import Matrix
from optperm.memory._projections import rotate


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
    change: Change,
    mu: jax.Array,
    nu: jax.Array,
    *,
    count: jax.Array,
    b1: float | jax.Array,
    b2: float | jax.Array,
) -> tuple[jax.Array, ...]:
    """Return C M, and c2 |(C * C)(V / c2 - (M / c1)^2) + (C M / c1)^2|, as LDAdam does."""
    # c_i = 1 - b_i^t, the bias corrections; before the first step there is nothing to carry.
    t = jnp.maximum(count, 1).astype(nu.dtype)
    c1, c2 = (1 - jnp.asarray(b, nu.dtype) ** t for b in (b1, b2))
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
    """Return for each leaf of params its moments in each known state of an optimizer's state.

    A leaf that a state does not see has `optax.MaskedNode` in place of its moments.
    """
    places = treedef.unflatten(range(treedef.num_leaves))

    def split(moments: Any) -> list[Any]:
        found: list[Any] = [optax.MaskedNode()] * treedef.num_leaves
        own = jax.tree.leaves(mask_like(places, moments))
        for index, moment in zip(own, jax.tree.leaves(moments), strict=True):
            found[index] = moment
        return found

    states = [
        [split(getattr(state, name)) for name in _KNOWN[type(state)][0]]
        for state in _find_known_states(inner_state)
    ]
    return [
        [tuple(tree[i] for tree in trees) for trees in states] for i in range(treedef.num_leaves)
    ]


def join_moments(inner_state: Any, moments: list[list[tuple[Any, ...]]]) -> Any:
    """Return an optimizer's state with the moments of each leaf, as `split_moments` returns them."""
    states = zip(*moments, strict=True)

    def join(node: Any) -> Any:
        if not _is_known(node) or not moments:
            return node
        fields = zip(_KNOWN[type(node)][0], zip(*next(states), strict=True), strict=True)
        return node._replace(**{name: join_field(getattr(node, name), new) for name, new in fields})

    def join_field(old: Any, new: tuple[Any, ...]) -> Any:
        seen = [moment for moment in new if not is_masked(moment)]
        return jax.tree.unflatten(jax.tree.structure(old), seen)

    return jax.tree.map(join, inner_state, is_leaf=_is_known)


def carry_moments(
    inner_state: Any,
    change: Change,
    moments: list[tuple[Any, ...]],
    *,
    b1: float | jax.Array,
    b2: float | jax.Array,
) -> list[tuple[Any, ...]]:
    """Return a leaf's moments in the coordinates of new bases.

    Args:
      inner_state: The optimizer's state.
      change: The change of the leaf's bases.
      moments: The leaf's moments in each known state, (..., r, k) in the orientation of the leaf.
      b1: The decay rate of Adam's first moments, for its bias correction; 0 for no correction.
      b2: The decay rate of Adam's second moments.
    """
    where = change.is_new[..., None, None]

    def carry(state: Any, each: tuple[Any, ...]) -> tuple[Any, ...]:
        if any(map(is_masked, each)):  # within inner
            return each
        formula = _KNOWN[type(state)][1]
        if formula is _carry_adam:
            formula = functools.partial(_carry_adam, count=state.count, b1=b1, b2=b2)
        # Rotated as (..., r, k) in the dtype of the basis, and kept where the basis has not changed
        low = [change.matrix.turn(leaf).astype(change.new.dtype) for leaf in each]
        return tuple(
            jnp.where(where, change.matrix.turn(new).astype(leaf.dtype), leaf)
            for new, leaf in zip(formula(change, *low), each, strict=True)
        )

    return list(map(carry, _find_known_states(inner_state), moments))


def check_moments(
    inner: optax.GradientTransformation,
    inner_state: Any,
    matrices: Sequence[Matrix | None],
    low: Any,
) -> None:
    """Raise a ValueError that names the first state whose moments cannot be carried over."""
    unknown = _find_unlike_params(inner_state, low)
    unknown = unknown or _find_unknown_state(inner_state, matrices, low)
    if unknown or (unknown := _find_other_squares(inner, inner_state, low)):
        raise ValueError(
            f"inner keeps a {unknown}, which cannot be carried over: pass carry=False."
        )


def _find_unlike_params(inner_state: Any, low: Any) -> str | None:
    """Return the first known state with moments that are not like low-rank leaves."""
    lows = jax.tree.leaves(low)
    for state in _find_known_states(inner_state):
        for name in _KNOWN[type(state)][0]:
            for moment, place, _ in match_params(getattr(state, name), low):
                if place is None or moment.shape != lows[place].shape:
                    return f"{type(state).__name__} whose {name} is not like params"
    return None


def _find_unknown_state(
    inner_state: Any, matrices: Sequence[Matrix | None], low: Any
) -> str | None:
    """Return the first other state with an array that may hold numbers of basis vectors.

    An array of a leaf at full rank holds none, and neither do single numbers and integers.
    """
    lows = jax.tree.leaves(low)
    others = jax.tree.map(
        lambda node: None if _is_known(node) else node, inner_state, is_leaf=_is_known
    )
    shapes = {leaf.shape for leaf, m in zip(lows, matrices, strict=True) if m is not None}
    # One number for each basis vector, as in a factored second moment
    shapes |= {(*m.batch_shape, m.rank) for m in matrices if m is not None}
    for leaf, place, owner in match_params(others, low):
        is_full = place is not None and matrices[place] is None
        is_array = leaf.size > 1 and jnp.issubdtype(leaf.dtype, jnp.inexact)
        if shapes and not is_full and (is_array or leaf.shape in shapes):
            return owner
    return None


def _find_other_squares(
    inner: optax.GradientTransformation, inner_state: Any, low: Any
) -> str | None:
    """Return the first state of Adam that holds no mean of gradients, or no mean of their squares.

    Optax gives the type of Adam's state to Adamax and ADOPT too. After one step from zero Adam's second
    moment is proportional to the square of its first moment, Adamax's to the moment itself, and ADOPT's
    first moment is zero.
    """

    def find_adams(state: Any) -> list[optax.ScaleByAdamState]:
        found = _find_known_states(state)
        return [each for each in found if isinstance(each, optax.ScaleByAdamState)]

    def take_step() -> list[bool]:
        # Gradients of several sizes, some of which differ after a clipping too
        sizes = 4.0 ** -np.arange(6, dtype=np.float32)
        g = jax.tree.map(
            lambda x: jnp.asarray(sizes.reshape((1,) * (x.ndim - 1) + (6,)) if x.ndim else 1.0), low
        )
        # A caller may have relaxed these options for its own thread alone.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            _, state = inner.update(g, inner.init(jax.tree.map(jnp.zeros_like, g)))
        return list(map(_has_squares, find_adams(state)))

    if not find_adams(inner_state):
        return None
    # Another thread has no trace and no mesh, so that numbers are concrete under any mapping.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        step = pool.submit(take_step)
    # There is no result if `inner` needs params or more, or has traced numbers.
    if step.exception() is None and not all(step.result()):
        return "ScaleByAdamState that is not Adam's (as Adamax's)"
    return None


def _has_squares(adam: optax.ScaleByAdamState) -> bool:
    """Return False if the moments after one step show that they are not Adam's."""
    mean, square = (
        np.concatenate([np.zeros(1), *(np.abs(np.ravel(x)).astype(np.float64) for x in leaves)])
        for leaves in map(jax.tree.leaves, (adam.mu, adam.nu))
    )
    # The largest mean, and the next smaller one
    top = np.argmax(mean)
    other = np.argmax(np.where(mean < mean[top] / 1.5, mean, 0.0))
    if mean[other] == 0:  # There is no other one, after a sign for example.
        return bool(mean[top] > 0 or not square.any())
    return bool(square[top] > (mean[top] / mean[other]) ** 1.5 * square[other])
