"""The door: every transformation of this library is made here, of two functions that hold its algorithm.

What each of them promises beside its algorithm is kept once: params that are there and match the state,
extra arguments that are there, an axis that is bound, and results of the types in which everything came.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from optperm.contract import checks
from optperm.contract.dtypes import cast_like
from optperm.contract.mapped_axes import AxisName
from optperm.contract.shardings import shard_like
from optperm.contract.states import mask_like

_EVALUATE = (
    "e = optperm.evaluate(loss_fn, params, batch{}), "
    "then update(e.grad, state, params, **e.extra_args)"
)
# What `optperm.evaluate` has to be given too.
_MORE = {"example_grad_fn": ", example=one_example"}
# What helps in a loop that somebody else wrote.
_NO_LOOP = "In a loop that cannot pass it: optperm.with_loss."
_SOURCE = "the optimizer state"


def transformation(
    init: Callable[[optax.Params], Any],
    update: Callable[..., tuple[optax.Updates, Any]],
    *,
    method: str,
    like: Callable[[Any], Any] | None = None,
    dtypes: bool = True,
    needs: Mapping[str, str] | None = None,
    needs_params: bool = True,
    is_wrapper: bool = False,
    updates_like: Literal["params", "updates"] = "params",
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    """A transformation that checks what it is given, and gives everything back in the type it came in.

    A type is what `jax.typeof` says of an array: its dtype, the mapped axes over which it varies, and
    its sharding on an explicit mesh. None is weak. Outside of `jax.jit` any sharding is kept.

    Args:
      init: `init(params)`, the state.
      update: `update(updates, state, params, **extra_args)`, the new updates and the new state. It names
        the extra arguments that it uses.
      method: The public name, for messages.
      like: From a state, a tree whose structure and shapes those of params and updates have to be: part
        of the state, or the `optperm.contract.states.one_row` of a part. None where no part of the
        state tells. Where it does not, and where it is masked, updates have to match params.
      dtypes: Whether the dtypes of params have to be those of that tree too.
      needs: The extra arguments that `update` cannot do without, and what each of them is. `grad_fn` is
        made of `value_fn` where that alone is given.
      needs_params: Whether `update` cannot do without params.
      is_wrapper: Whether it only hands on to other transformations, which then judge the dtypes and the
        trees themselves.
      updates_like: Whether the new updates are of the types of params, where there are any, or of those
        of the updates.
      axis_name: The mapped axis that has to be bound where `update` is called.

    Returns:
      The transformation.
    """
    wanted = needs or {}

    def init_fn(params: optax.Params) -> Any:
        if not is_wrapper:
            checks.check_real_floating("params", params)
        state = init(params)
        return cast_like(state, state)

    def update_fn(
        updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        if params is None and needs_params:
            raise ValueError(
                f"{method} needs the current params: call update(updates, state, params) with them."
            )
        if like is not None:
            expected = like(state)
            if params is not None:
                seen = mask_like(params, expected)
                checks.check_same_tree("params", seen, expected, source=_SOURCE, dtypes=dtypes)
                checks.check_same_mesh("params", seen, expected, source=_SOURCE)
            seen = mask_like(updates, expected)
            checks.check_same_tree("updates", seen, expected, source=_SOURCE, dtypes=False)
        if params is not None and not is_wrapper:
            checks.check_same_tree("updates", updates, params, source="params", dtypes=False)
        value_fn = extra_args.get("value_fn")
        if "grad_fn" in wanted and extra_args.get("grad_fn") is None and value_fn is not None:
            extra_args["grad_fn"] = _gradient_of(value_fn, method)
        _check_extras(method, wanted, extra_args)
        checks.check_axis_is_bound(axis_name)
        if params is not None and not is_wrapper:
            # Gradients may lie elsewhere than the params, which operations on an explicit mesh refuse.
            updates = jax.tree.map(shard_like, updates, params)
        new_updates, new_state = update(updates, state, params, **extra_args)
        other = params if updates_like == "params" and params is not None else updates
        return cast_like(new_updates, other), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def known_extra_args(tx: Any, extra_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the extra arguments that a transformation takes: `optax.contrib.sam` takes one of them."""
    parameters = inspect.signature(tx.update).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(extra_args)
    return {name: value for name, value in extra_args.items() if name in parameters}


def _check_extras(method: str, needs: Mapping[str, str], extra_args: Mapping[str, Any]) -> None:
    """Raises a ValueError that names all extra arguments that are missing."""
    missing = [name for name in needs if extra_args.get(name) is None]
    if not missing:
        return
    named = ", and ".join(f"{name}, {needs[name]}" for name in missing)
    code = _EVALUATE.format("".join(_MORE.get(name, "") for name in missing))
    raise ValueError(
        f"{method} needs the extra argument{'s' if len(missing) > 1 else ''} {named}: {code}. {_NO_LOOP}"
    )


def _gradient_of(value_fn: Callable[..., Any], method: str) -> Callable[..., optax.Updates]:
    """What `grad_fn` is, where a loop hands on `value_fn` alone, as those for Optax's L-BFGS do."""

    def grad_fn(params: optax.Params, **part: Any) -> optax.Updates:
        if part:
            raise ValueError(
                f"{method} needs the extra argument grad_fn, which takes a part of the batch (start=, "
                f"size=), and value_fn does not: {_EVALUATE.format('')}. {_NO_LOOP}"
            )
        return jax.grad(value_fn)(params)

    return grad_fn
