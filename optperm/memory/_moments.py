"""Carry the moments of Optax's transformations over from one basis to the next."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from optperm.core.states import Match, find_states, has_protocol, match_params
from optperm.core.trees import is_masked, mask_like
from optperm.memory._matrices import Matrix, list_matrices
from optperm.memory._projections import rotate


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


def _carry_mean(change: Change, moment: jax.Array) -> tuple[jax.Array, ...]:
    """Return C M."""
    return (change.rotate(moment),)


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


def _carry_adamax(change: Change, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
    """Return C M, and the root of (C * C) U^2, where U are the maximum magnitudes of entries."""
    return change.rotate(mu), jnp.sqrt(change.rotate_squares(jnp.square(nu)))


# A function from a change of a leaf's basis and the leaf's moments, (..., r, k), to the new moments
Formula = Callable[..., tuple[jax.Array, ...]]
# The arrays of a field are linear in gradients, linear in squares of gradients, or maxima of such
# squares.
Role = Literal["mean", "square", "maximum"]


class Known(NamedTuple):
    """A type of state whose moments are known.

    Attributes:
      roles: The fields with moments, and the role of each field.
      carry: The function that carries a leaf's moments over to another basis, or None if unknown.
    """

    roles: dict[str, Role]
    carry: Formula | None = None


# RAdam, NAdam, Yogi, Adamax and ADOPT of Optax share the type of Adam's state.
KNOWN: dict[type, Known] = {
    optax.ScaleByAdamState: Known({"mu": "mean", "nu": "square"}, _carry_adam),
    optax.ScaleByAmsgradState: Known({"mu": "mean", "nu": "square", "nu_max": "maximum"}),
    optax.ScaleByBeliefState: Known({"mu": "mean", "nu": "square"}),
    optax.contrib.ScaleByAdemamixState: Known({"m1": "mean", "m2": "mean", "nu": "square"}),
    optax.ScaleByLionState: Known({"mu": "mean"}, _carry_mean),
    optax.EmaState: Known({"ema": "mean"}, _carry_mean),
    optax.TraceState: Known({"trace": "mean"}, _carry_mean),
    optax.contrib.MuonState: Known({"mu": "mean"}, _carry_mean),
    optax.ScaleByRmsState: Known({"nu": "square"}, _carry_squares),
    optax.ScaleByRssState: Known({"sum_of_squares": "square"}),
    optax.FactoredState: Known({"v": "square"}),
    # The last gradient, `g`, is no moment: rounding would dominate its difference from the next one
    optax.ScaleByAdanState: Known({"m": "mean", "v": "mean", "n": "square"}),
}


def is_known(node: Any) -> bool:
    """Return whether a node is a state whose moments are known."""
    return type(node) in KNOWN


def find_known_states(inner_state: Any) -> list[Any]:
    """Return the states whose moments are known, in the order of the tree."""
    return list(filter(is_known, jax.tree.leaves(inner_state, is_leaf=is_known)))


def _is_carried(node: Any) -> bool:
    return is_known(node) and KNOWN[type(node)].carry is not None


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
        [split(getattr(state, name)) for name in KNOWN[type(state)].roles]
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
        fields = zip(KNOWN[type(node)].roles, zip(*next(states), strict=True), strict=True)
        return node._replace(**{name: join_field(getattr(node, name), new) for name, new in fields})

    def join_field(old: Any, new: tuple[Any, ...]) -> Any:
        seen = [moment for moment in new if not is_masked(moment)]
        return jax.tree.unflatten(jax.tree.structure(old), seen)

    return jax.tree.map(join, inner_state, is_leaf=_is_carried)


def find_formulas(
    inner_state: Any,
    probe: Probe,
    make_params: Callable[[], Any],
    *,
    b1: float | jax.Array,
    b2: float | jax.Array,
) -> list[Formula]:
    """Return the formula for each state whose moments can be carried over.

    Args:
      inner_state: The optimizer's state.
      probe: The optimizer's probe, which distinguishes Adamax from Adam.
      make_params: A function that makes low-rank leaves for the probe.
      b1: The decay rate of Adam's first moments, for its bias correction; 0 for no correction.
      b2: The decay rate of Adam's second moments.
    """
    formulas, states = [], find_carried_states(inner_state)
    seconds = probe(inner_state, make_params, find_carried_states)
    for state, second in zip(states, seconds, strict=True):
        formula: Any = KNOWN[type(state)].carry
        if formula is _carry_adam and second == "sizes":
            formula = _carry_adamax
        elif formula is _carry_adam:
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


def check_moments(
    inner_state: Any,
    plans: Any,
    low: Any,
    probe: Probe,
    *,
    b1: float | jax.Array,
    b2: float | jax.Array,
) -> None:
    """Raise a ValueError that names the first state whose moments cannot be carried over."""
    _check_codes(inner_state, plans, low)
    unknown = _find_unlike_params(inner_state, plans, low)
    unknown = unknown or _find_unknown_state(inner_state, plans, low)
    if not unknown and "unknown" in probe(inner_state, lambda: low, find_carried_states):
        unknown = "ScaleByAdamState that is not Adam's (such as ADOPT's)"
    if unknown:
        raise ValueError(
            f"inner contains the state {unknown}, which cannot be carried over: pass carry=False."
        )
    _check_decays(probe.find_ratios(inner_state), b1, b2)


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


def _check_decays(ratios: list[float | None], b1: float | jax.Array, b2: float | jax.Array) -> None:
    """Raise unless (1 - b2) / (1 - b1)^2 is nu / mu^2 after the trial step of each Adam."""
    if isinstance(b1, jax.core.Tracer) or isinstance(b2, jax.core.Tracer) or (b1 == 0 and b2 == 0):
        return
    wanted = float((1 - b2) / (1 - b1) ** 2)
    # The moments may be in bfloat16, and Yogi's second moment does not start at zero.
    for ratio in (each for each in ratios if each is not None):
        if not 0.8 < ratio / wanted < 1.25:
            raise ValueError(
                f"b1={b1} and b2={b2} are not the decay rates of Adam in inner. After one step, its "
                f"second moment is {ratio:.4g} times the squared first moment, not {wanted:.4g} times. "
                "Pass the b1 and b2 of inner, or 0.0 for both if moments need no bias correction."
            )


def _find_unlike_params(inner_state: Any, plans: Any, low: Any) -> str | None:
    """Return the first known state with moments that are not like low-rank leaves.

    Moments of leaves at full rank are not carried over, so they may have any shape.
    """
    lows, matrices = jax.tree.leaves(low), list_matrices(plans, low)
    for state in find_carried_states(inner_state):
        for name in KNOWN[type(state)].roles:
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


# The second moment in a state of Adam's type: squares (Adam), magnitudes (Adamax) or something else.
Second = Literal["squares", "sizes", "unknown"]


class Trial(NamedTuple):
    """The result of a trial step for one state.

    Attributes:
      second: The kind of its second moment.
      ratio: nu / mu^2, which is (1 - b2) / (1 - b1)^2 for Adam; None if unknown.
    """

    second: Second
    ratio: float | None


class Probe:
    """A trial step of an optimizer on a few numbers, once for each structure of its state.

    In Optax, Adamax and ADOPT share the type of Adam's state. After one step from zero, Adam's second
    moment is proportional to the square of the first moment, Adamax's second moment is proportional to
    the first moment itself, and ADOPT's first moment is zero.
    """

    def __init__(self, inner: optax.GradientTransformation) -> None:
        self.inner = inner
        self.found: dict[Any, list[Trial]] = {}

    def __call__(
        self, inner_state: Any, make_params: Callable[[], Any], find: Callable[[Any], list[Any]]
    ) -> list[Second]:
        """Return the kind of second moment of each state that `find` finds, "squares" for other types.

        All states of Adam's type count as Adam's if `inner` has traced numbers or needs extra arguments.
        """
        structure = jax.tree.structure(inner_state)
        if structure not in self.found:
            count, params = len(find(inner_state)), make_params()
            # Another thread has no trace and no mesh, so numbers are concrete under any mapping.
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                step = pool.submit(self._take_step, params, find)
            shown = [] if step.exception() else step.result()
            unknown = [Trial("squares", None)] * count
            self.found[structure] = shown if len(shown) == count else unknown
        return [each.second for each in self.found[structure]]

    def find_ratios(self, inner_state: Any) -> list[float | None]:
        """Return nu / mu^2 after the step in each state of an earlier call, as far as it is Adam's."""
        return [each.ratio for each in self.found[jax.tree.structure(inner_state)]]

    def _take_step(self, params: Any, find: Callable[[Any], list[Any]]) -> list[Trial]:
        # Gradients have several magnitudes, some of which differ even after clipping
        sizes = 4.0 ** -np.arange(6, dtype=np.float32)
        g = jax.tree.map(
            lambda x: jnp.asarray(
                np.broadcast_to(sizes, (6,) * jnp.ndim(x)) if jnp.ndim(x) else np.float32(1)
            ),
            params,
        )
        zeros = jax.tree.map(jnp.zeros_like, g)
        # The caller may have relaxed these options only for its own thread.
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            update = optax.with_extra_args_support(self.inner).update
            _, state = update(g, self.inner.init(zeros), zeros)
        return list(map(_examine_step, find(state)))


def _flatten(tree: Any) -> np.ndarray[Any, Any]:
    """Return a zero followed by the magnitudes of all entries of a tree."""
    leaves = [np.abs(np.ravel(x)).astype(np.float64) for x in jax.tree.leaves(tree)]
    return np.concatenate([np.zeros(1), *leaves])


def _examine_step(state: Any) -> Trial:
    """Return the kind of second moment in a state of Adam's type, after one step from zero."""
    if not isinstance(state, optax.ScaleByAdamState):
        return Trial("squares", None)
    mean, square = _flatten(state.mu), _flatten(state.nu)
    # Compare the largest mean and the next smaller mean
    top = np.argmax(mean)
    if mean[top] == 0:
        return Trial("unknown" if square.any() else "squares", None)
    ratio = float(square[top] / mean[top] ** 2)
    other = np.argmax(np.where(mean < mean[top] / 1.5, mean, 0.0))
    if mean[other] == 0:  # All means are equal, for example after a sign.
        return Trial("squares", ratio)
    is_square = square[top] > (mean[top] / mean[other]) ** 1.5 * square[other]
    return Trial("squares", ratio) if is_square else Trial("sizes", None)
