"""The door: every transformation of this library is made here, of two functions that hold its algorithm.

What each of them promises beside its algorithm is kept once: params that are there and match the state,
extra arguments that are there, an axis that is bound, and results of the types in which everything came.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import optax

from optperm.contract import checks
from optperm.contract.dtypes import cast_like
from optperm.contract.mapped_axes import AxisName
from optperm.contract.shardings import shard_like

_EVALUATE = (
    "e = optperm.evaluate(loss_fn, params, batch{}), "
    "then update(e.grad, state, params, **e.extra_args)"
)
# What `optperm.evaluate` has to be given too.
_MORE = {"example_grad_fn": ", example=one_example"}
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
        state tells; updates then have to match params.
      dtypes: Whether the dtypes of params have to be those of that tree too.
      needs: The extra arguments that `update` cannot do without, and what each of them is.
      needs_params: Whether `update` cannot do without params.
      is_wrapper: Whether it only hands on to other transformations, which then judge the dtypes and the
        trees themselves.
      updates_like: Whether the new updates are of the types of params, where there are any, or of those
        of the updates.
      axis_name: The mapped axis that has to be bound where `update` is called.

    Returns:
      The transformation.
    """

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
                checks.check_same_tree("params", params, expected, source=_SOURCE, dtypes=dtypes)
                checks.check_same_mesh("params", params, expected, source=_SOURCE)
            checks.check_same_tree("updates", updates, expected, source=_SOURCE, dtypes=False)
        elif params is not None and not is_wrapper:
            checks.check_same_tree("updates", updates, params, source="params", dtypes=False)
        for name, meaning in (needs or {}).items():
            if extra_args.get(name) is None:
                code = _EVALUATE.format(_MORE.get(name, ""))
                raise ValueError(f"{method} needs the extra argument {name}, {meaning}: {code}.")
        checks.check_axis_is_bound(axis_name)
        if params is not None and not is_wrapper:
            # Gradients may lie elsewhere than the params, which operations on an explicit mesh refuse.
            updates = jax.tree.map(shard_like, updates, params)
        new_updates, new_state = update(updates, state, params, **extra_args)
        wanted = params if updates_like == "params" and params is not None else updates
        return cast_like(new_updates, wanted), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
