"""The center of AGN and DiLoCo, out of any optimizer state."""

from typing import Any

import jax
import numpy as np
import optax

from optperm.contract import checks
from optperm.contract.states import fill_masked, find_state
from optperm.distributed.agn import AgnState
from optperm.distributed.diloco import DilocoState

# The states of methods whose replicas train each by itself.
LOCAL_STATES = (AgnState, DilocoState)


def center_params(
    opt_state: Any, params: optax.Params | None = None, *, final: bool = False
) -> optax.Params:
    """Return the center: the params that all replicas of `optperm.agn` or `optperm.diloco` agree on.

    With `commit="pairs"` each replica has a center of its own: test the mean of them, or any.

    Between two commits the local params have moved on from it. It is what to test and to keep when
    training ends. Make the last step with `commit=True`, or the last local steps are not in it: a plan
    with several fragments or a delay has no other step that brings in all of them.

    Args:
      opt_state: The optimizer state, in any nesting. One with a leading axis of replicas gives a center
        with that axis, all of its entries the same but for `commit="pairs"`.
      params: The params, from which come the leaves that the method does not train, as within
        `optax.partition` or `optax.masked`. Without it they are `optax.MaskedNode`.
      final: Whether to raise if local steps are not in the center. Outside of `jax.jit`.

    Returns:
      A tree of the structure, shapes and dtypes of the params, or of the `center_dtype`.

    Raises:
      ValueError: If there is no such state in `opt_state`, or more than one; or with `final=True`, if
        the last step was no commit of all params.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.clip(1.0), optperm.agn(optax.sgd(0.5), communication_period=2))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
      >>> optax.apply_updates(params, updates).tolist()  # one local step
      [0.5, 1.5]
      >>> optperm.center_params(opt_state).tolist()  # no commit yet
      [1.0, 2.0]
    """
    checks.check_flag("final", final)
    state: Any = find_state(opt_state, LOCAL_STATES, method="agn or optperm.diloco")
    if final and (steps := int(np.max(jax.device_get(state.since_commit)))):
        raise ValueError(
            f"The center is without the last {steps} steps, or with a plan without parts of them: make "
            "the last step with commit=True."
        )
    return state.center if params is None else fill_masked(state.center, params)
