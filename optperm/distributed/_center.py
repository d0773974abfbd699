"""Find the center of AGN and DiLoCo in any optimizer state."""

from typing import Any

import optax

from optperm.core.states import find_state, local_values
from optperm.core.trees import fill_masked
from optperm.distributed._agn import AgnState
from optperm.distributed._diloco import DilocoState

# The states of methods whose replicas train their own params.
LOCAL_STATES = (AgnState, DilocoState)


def center_params(
    opt_state: Any, params: optax.Params | None = None, *, final: bool = False
) -> optax.Params:
    """Return the center: the params that all replicas of `optperm.agn` or `optperm.diloco` agree on.

    Args:
      opt_state: The optimizer state, in any nesting. A state with a leading axis of replicas gives a
        center with that axis.
      params: The params, for the leaves that the method does not train, as within `optax.partition` or
        `optax.masked`. Without params these leaves are `optax.MaskedNode`.
      final: Whether to raise if local steps are missing from the center. Not within `jax.jit`.

    Returns:
      A tree of the structure and shapes of the params, in their dtypes or in `center_dtype`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optax.chain(optax.clip(1.0), optperm.agn(optax.sgd(0.5), every=2))
      >>> params = jnp.array([1.0, 2.0])
      >>> opt_state = tx.init(params)
      >>> updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
      >>> optax.apply_updates(params, updates).tolist()  # one local step
      [0.5, 1.5]
      >>> optperm.distributed.center_params(opt_state).tolist()  # no commit yet
      [1.0, 2.0]

    Notes:
      Test the center, and keep it when training ends: between two commits each replica has params of its
      own. Make the last step with `commit=True`, or the center lacks the last local steps; a plan with
      several fragments or a delay has no other step that brings in all of them.

      With `combine="pairs"` each replica has a center of its own: test any, or their mean.

    Raises:
      ValueError: If `opt_state` holds no such state, or more than one; with `final=True`, if the last
        step was not a commit of all params.
    """
    state: Any = find_state(opt_state, LOCAL_STATES, method="agn or optperm.diloco")
    if final and (steps := int(local_values(state.since_commit).max())):
        raise ValueError(
            f"The center lacks (parts of) the last {steps} steps: end with commit=True."
        )
    return state.center if params is None else fill_masked(state.center, params)
