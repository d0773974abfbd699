"""Make all transformations of this library from two functions that contain the algorithm.

This file is the single place for common checks (the state belongs to the method, params are given and
match the state, needed extra arguments are given, the mapped axis is bound), and casts results to the
types of the inputs.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from optperm.core import checks
from optperm.core.dtypes import cast_like, restore_booleans
from optperm.core.fingerprints import check_fingerprint, fill_fingerprint
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Params, Updates
from optperm.core.shardings import shard_like
from optperm.core.trees import mask_like

_EVALUATE = (
    "e = optperm.evaluate(loss_fn, params, batch{}), "
    "then update(e.grad, state, params, **e.extra_args)"
)
# Further arguments of `optperm.evaluate` that extra arguments need.
_MORE = {"example_grad_fn": ", example=one_example"}
_OTHER_LOOPS = "In a loop without extra arguments, use optperm.with_loss."
_SOURCE = "the optimizer state"


def transformation(
    init: Callable[[Params], Any],
    update: Callable[..., tuple[Updates, Any]],
    *,
    method: str,
    like: Callable[[Any], Any] | None = None,
    dtypes: bool = False,
    needs: Mapping[str, str] | None = None,
    needs_params: bool = True,
    updates_like: Literal["params", "updates"] = "params",
    axis_name: AxisName | None = None,
    shape_arguments: Callable[[Any], Mapping[str, Any]] | None = None,
    takes_gradient: bool = False,
    conversion: str = "",
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that checks its inputs and returns everything in the types of the inputs.

    The type of an array is `jax.typeof(array)`: its dtype, the mapped axes over which it varies, and its
    sharding on an explicit mesh. No type is weak. Outside `jax.jit`, any sharding is preserved.

    Args:
      init: `init(params)` returns the state. The state passed to `update` must have the annotated type.
      update: `update(updates, state, params, **extra_args)` returns the new updates and the new state.
        Its signature names the extra arguments that it uses.
      method: The public name, for messages.
      like: `like(state)` returns a tree whose structure and shapes params and updates must have: a part
        of the state, or `optperm.core.trees.one_row` of a part. None if the state has no such part. In
        this case, and where the tree is masked, updates must match params.
      dtypes: Whether params must also have the dtypes of this tree.
      needs: The extra arguments that `update` needs, each with its description. `grad_fn` is made from
        `value_fn` if only `value_fn` is given.
      needs_params: Whether `update` needs params.
      updates_like: Whether the new updates have the types of params, if given, or of the updates.
      axis_name: The mapped axis that must be bound in calls of `update`.
      shape_arguments: `shape_arguments(params)` returns the values of the arguments by which the state
        is shaped, as for `optperm.core.fingerprints.fill_fingerprint`. The state is a `ShapedState`,
        whose fingerprint is filled in here, and compared in each `update` that is not traced.
      takes_gradient: Whether the updates must be the gradient of the loss, as for samplers. The extra
        argument `watch`, if given, is then called with the updates.
      conversion: A sentence about the conversion of another optimizer's state, for the message.

    Returns:
      The transformation.
    """
    own_type, wanted = _find_own_type(init), needs or {}

    def init_fn(params: Params) -> Any:
        checks.check_real_floating("params", params)
        return _with_fingerprint(init(params), params, shape_arguments)

    def update_fn(
        updates: Updates, state: Any, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, Any]:
        checks.check_state(method, state, own_type, conversion)
        if needs_params:
            _check_are_given(method, params)
        # Params and updates must match the state, or JAX would broadcast other shapes to a wrong result.
        if like is not None:
            expected = like(state)
            if params is not None:
                seen = mask_like(params, expected)
                checks.check_same_tree("params", seen, expected, source=_SOURCE, dtypes=dtypes)
            seen = mask_like(updates, expected)
            checks.check_same_tree("updates", seen, expected, source=_SOURCE, dtypes=False)
        if params is not None:
            checks.check_same_tree("updates", updates, params, source="params", dtypes=False)
        like_params = updates if params is None else params
        _check_arguments(method, state, like_params, shape_arguments)
        value_fn = extra_args.get("value_fn")
        if "grad_fn" in wanted and extra_args.get("grad_fn") is None and value_fn is not None:
            extra_args["grad_fn"] = _make_grad_fn(value_fn, method)
        _check_extras(method, wanted, extra_args)
        checks.check_axis_is_bound(axis_name)
        if takes_gradient and extra_args.get("watch") is not None:
            extra_args["watch"](updates)
        if params is not None:
            # Operations on an explicit mesh reject gradients whose sharding differs from the params'.
            updates = jax.tree.map(shard_like, updates, params)
        booleans = restore_booleans(state)
        new_updates, new_state = update(updates, booleans, params, **extra_args)
        # The method may compute in other dtypes, but the types of state and updates never change.
        other = params if updates_like == "params" and params is not None else updates
        return cast_like(new_updates, other), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def wrapper(
    init: Callable[[Params], Any],
    update: Callable[..., tuple[Updates, Any]],
    *,
    method: str,
    shape_arguments: Callable[[Any], Mapping[str, Any]] | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Make a transformation that only calls others, which check dtypes and trees themselves.

    Results have the types of the inputs, as with `transformation`.

    Args:
      init: `init(params)` returns the state. The state passed to `update` must have the annotated type.
      update: `update(updates, state, params, **extra_args)` returns the new updates and the new state.
      method: The public name, for messages.
      shape_arguments: As for `transformation`.

    Returns:
      The transformation, whose `update` needs params.
    """
    own_type = _find_own_type(init)

    def init_fn(params: Params) -> Any:
        return _with_fingerprint(init(params), params, shape_arguments)

    def update_fn(
        updates: Updates, state: Any, params: Params | None = None, **extra_args: Any
    ) -> tuple[Updates, Any]:
        checks.check_state(method, state, own_type)
        _check_are_given(method, params)
        _check_arguments(method, state, params, shape_arguments)
        booleans = restore_booleans(state)
        new_updates, new_state = update(updates, booleans, params, **extra_args)
        return cast_like(new_updates, params), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _find_own_type(init: Callable[..., Any]) -> Any:
    """Return the type of the states that `init` makes, from its annotation."""
    return inspect.get_annotations(init, eval_str=True).get("return", Any)


def _with_fingerprint(
    state: Any, params: Any, shape_arguments: Callable[[Any], Mapping[str, Any]] | None
) -> Any:
    """Return a new state with strong types and the fingerprint of the arguments that shape it."""
    if shape_arguments is not None:
        state = fill_fingerprint(state, shape_arguments(params))
    # A weak type would become strong in the first step and break a jax.lax.scan.
    return cast_like(state, state)


def _check_arguments(
    method: str,
    state: Any,
    params: Any,
    shape_arguments: Callable[[Any], Mapping[str, Any]] | None,
) -> None:
    """Raise if a state was made with other arguments; those of a traced state cannot be read."""
    if shape_arguments is not None and not isinstance(state.fingerprint, jax.core.Tracer):
        check_fingerprint(method, state, shape_arguments(params))


def _check_are_given(method: str, params: Params | None) -> None:
    if params is None:
        raise ValueError(f"{method} needs params: call update(updates, state, params).")


def known_extra_args(tx: Any, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that a transformation accepts; `optax.contrib.sam` accepts only one."""
    parameters = inspect.signature(tx.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(extra_args)
    return {name: value for name, value in extra_args.items() if name in parameters}


def _check_extras(method: str, needs: Mapping[str, str], extra_args: Mapping[str, Any]) -> None:
    """Raise a ValueError that names all missing extra arguments."""
    missing = [name for name in needs if extra_args.get(name) is None]
    if missing:
        named = ", and ".join(f"{name}, {needs[name]}" for name in missing)
        needed = f"the extra argument{'s' * (len(missing) > 1)} {named}"
        code = _EVALUATE.format("".join(_MORE.get(name, "") for name in missing))
        raise ValueError(f"{method} needs {needed}: {code}. {_OTHER_LOOPS}")


def _make_grad_fn(value_fn: Callable[..., Any], method: str) -> Callable[..., Updates]:
    """Return `grad_fn` for loops that pass only `value_fn`, such as loops for Optax's L-BFGS."""

    def grad_fn(params: Params, **part: Any) -> Updates:
        if part:
            # The gradient over the whole batch would be mistaken for the gradient over a part.
            needed = "grad_fn, which takes a part of the batch (start=, size=), unlike value_fn"
            code = _EVALUATE.format("")
            raise ValueError(f"{method} needs the extra argument {needed}: {code}. {_OTHER_LOOPS}")
        return jax.grad(value_fn)(params)

    return grad_fn
