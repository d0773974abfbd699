"""The table of the states whose moments are known, and their arrays."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, get_args

import jax
import optax
import optax.contrib

from optperm.core import checks

# The arrays of a field are linear in gradients, linear in squares of gradients, or maxima of such
# squares. "matrix" is a mean that is orthogonalized. "centered" is a square from which the optimizer
# subtracts the square of a mean.
Role = Literal["mean", "matrix", "square", "maximum", "centered"]

# The fields with moments of each type of state, and the role of each field
KNOWN: dict[type, dict[str, Role]] = {}


def register_moments(state_type: type, **roles: Role) -> None:
    r"""Tell `optperm.quantize_state` and `optperm.low_rank` which fields of a state are moments.

    The states of Optax's optimizers are registered already. With gradients g, a field is a "mean" if it
    is linear in g, and a "square" if it is linear in :math:`g^2`:

    .. math::
      m \leftarrow \beta_1 m + (1 - \beta_1) g, \qquad v \leftarrow \beta_2 v + (1 - \beta_2) g^2

    Call this function once, where the optimizer is defined, before `init`.

    Args:
      state_type: The type of the optimizer's state, a NamedTuple.
      **roles: For each field with moments, a tree like params, its role: "mean"; "matrix" for a mean
        that the optimizer orthogonalizes, as Muon does; "square", which is never negative; "maximum"
        for a maximum of squares; or "centered" for a square v of an optimizer that divides by the root
        of :math:`v - m^2`, where m is the field before it in this call.

    Returns:
      None. The registration holds for the whole process.

    Example:
      >>> from typing import Any, NamedTuple
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> class Momentum(NamedTuple):
      ...     m: Any
      >>> optperm.memory.register_moments(Momentum, m="mean")
      >>> def update(grads, state, params=None):
      ...     m = jax.tree.map(lambda m, g: 0.9 * m + g, state.m, grads)
      ...     return m, Momentum(m)
      >>> mine = optax.GradientTransformation(lambda p: Momentum(optax.tree.zeros_like(p)), update)
      >>> params = {"kernel": jnp.ones((64, 256))}
      >>> optperm.quantize_state(mine).init(params).inner_state.m["kernel"].dtype
      dtype(float8_e4m3fn)

    Notes:
      `low_rank(carry=True)` carries over states whose fields are all means or matrices. A function that
      `jax.jit` compiled before this call does not know the state.

    Raises:
      TypeError: If `state_type` is not a type of NamedTuple.
      ValueError: If no roles are given, the type has no such field, a role is unknown, "centered" comes
        first, or the type is registered with other roles.
    """
    fields = getattr(state_type, "_fields", None)
    if not isinstance(state_type, type) or not isinstance(fields, tuple):
        raise TypeError(f"state_type must be a NamedTuple, the type itself, got {state_type!r}.")
    name = state_type.__name__
    if not roles:
        raise ValueError(
            f'register_moments needs a role for a field of {name}, such as {fields[0]}="mean".'
        )
    for field, role in roles.items():
        if field not in fields:
            raise ValueError(f"{name} has no field {field!r}: its fields are {', '.join(fields)}.")
        checks.check_choice(field, role, get_args(Role))
    if next(iter(roles.values())) == "centered":
        raise ValueError('A "centered" field needs the field of its mean before it.')
    known = KNOWN.setdefault(state_type, roles)
    if known != roles or list(known) != list(roles):
        raise ValueError(f"{name} is registered with other roles, {known}.")


# RAdam, NAdam, Yogi, Adamax and ADOPT of Optax share the type of Adam's state.
register_moments(optax.ScaleByAdamState, mu="mean", nu="square")
register_moments(optax.ScaleByAmsgradState, mu="mean", nu="square", nu_max="maximum")
register_moments(optax.ScaleByBeliefState, mu="mean", nu="square")
register_moments(optax.contrib.ScaleByAdemamixState, m1="mean", m2="mean", nu="square")
register_moments(optax.contrib.ScaleBySimplifiedAdEMAMixState, m="mean", n="square")
register_moments(optax.ScaleByLionState, mu="mean")
register_moments(optax.EmaState, ema="mean")
register_moments(optax.TraceState, trace="mean")
register_moments(optax.contrib.MuonState, mu="matrix")
register_moments(optax.ScaleByRmsState, nu="square")
register_moments(optax.ScaleByRStdDevState, mu="mean", nu="centered")
register_moments(optax.ScaleByAdaDeltaState, e_g="square", e_x="square")
register_moments(optax.ScaleByRssState, sum_of_squares="square")
register_moments(optax.FactoredState, v="square")
# The last gradient, `g`, is no moment: rounding would dominate its difference from the next one
register_moments(optax.ScaleByAdanState, m="mean", v="mean", n="square")
# Optax does not export the type of RMSProp's state with a bias correction
RmsWithCount: type = type(jax.eval_shape(optax.scale_by_rms(bias_correction=True).init, ()))
register_moments(RmsWithCount, nu="square")


class Moment(NamedTuple):
    """An array of moments.

    Attributes:
      array: The array.
      role: The role of its field.
      place: The number of the array in its field.
      mean: For a "centered" square, the number of its mean among all moments; otherwise None.
    """

    array: Any
    role: Role
    place: int
    mean: int | None


def is_known(node: Any) -> bool:
    """Return whether a node is a state whose moments are known."""
    return type(node) in KNOWN


def find_known_states(inner_state: Any) -> list[Any]:
    """Return the states whose moments are known, in the order of the tree."""
    return list(filter(is_known, jax.tree.leaves(inner_state, is_leaf=is_known)))


def list_moments(inner_state: Any) -> list[Moment]:
    """Return the moments of all known states, in the order of the tree and of the registered fields."""
    found: list[Moment] = []
    for state in find_known_states(inner_state):
        for field, role in KNOWN[type(state)].items():
            arrays = jax.tree.leaves(getattr(state, field))
            start = len(found)
            for place, array in enumerate(arrays):
                mean = start - len(arrays) + place if role == "centered" else None
                found.append(Moment(array, role, place, mean))
    return found


def replace_moments(inner_state: Any, arrays: Iterable[Any]) -> Any:
    """Return a state with other moments, in the order of `list_moments`."""
    unused: Iterator[Any] = iter(arrays)

    def replace(node: Any) -> Any:
        if not is_known(node):
            return node
        fields = {}
        for field in KNOWN[type(node)]:
            leaves, structure = jax.tree.flatten(getattr(node, field))
            fields[field] = jax.tree.unflatten(structure, [next(unused) for _ in leaves])
        return node._replace(**fields)

    return jax.tree.map(replace, inner_state, is_leaf=is_known)
