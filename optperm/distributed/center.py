"""The center of AGN and DiLoCo, out of any optimizer state."""

from typing import Any

import optax

from optperm.contract.states import find_state
from optperm.distributed.local_steps import LocalStepsState
from optperm.distributed.streaming import StreamingState

# The states of methods whose replicas train each by itself.
LOCAL_STATES = (LocalStepsState, StreamingState)


def center_params(opt_state: Any) -> optax.Params:
    """The center: the params that all replicas of `optperm.agn` or `optperm.diloco` agree on.

    Between two commits the local params have moved on from it. It is what to test and to keep when
    training ends; end on a multiple of the period, or the last local steps are not in it.

    Args:
      opt_state: The optimizer state, in any nesting. One with a leading axis of replicas gives a center
        with that axis, all of its entries the same.

    Returns:
      A tree of the structure, shapes and dtypes of the params, or of the `center_dtype`.

    Raises:
      ValueError: If there is no such state in `opt_state`, or more than one.

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
    state: Any = find_state(opt_state, LOCAL_STATES, method="agn or optperm.diloco")
    return state.center
