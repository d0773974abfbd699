"""Find the center of AGN and DiLoCo in any optimizer state."""

from typing import Any

from optperm.core.shapes import Params
from optperm.core.states import find_state, local_values
from optperm.core.trees import fill_masked
from optperm.distributed._agn import AgnState
from optperm.distributed._diloco import DilocoState

# The states of methods in which each replica trains its own params.
LOCAL_STATES = (AgnState, DilocoState)


def center_params(opt_state: Any, params: Params | None = None, *, final: bool = False) -> Params:
    """Return the center, the common params of all replicas of `optperm.agn` or `optperm.diloco`.

    Args:
      opt_state: The optimizer state, in any nesting. If the state has a leading axis of replicas, the
        center has this axis too.
      params: The params, from which leaves that the method does not train are taken, such as within
        `optax.partition` or `optax.masked`. Without params, these leaves are `optax.MaskedNode`.
      final: Whether to raise an error if the center lacks local steps. True does not work within
        `jax.jit`.

    Returns:
      A tree with the structure and shapes of the params, in their dtypes or in `center_dtype`.

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
      Test and save the center, because between commits each replica has its own params. Take the last
      step with `commit=True`; otherwise the center lacks the last local steps. If a plan has several
      fragments or a delay, only `commit=True` or `"only"` exchanges all fragments at once.

      With `combine="pairs"`, each replica has its own center. Test any of these centers, or their mean.

    Raises:
      ValueError: If `opt_state` does not contain exactly one state of these methods, or, with
        `final=True`, if the last step did not commit all params.
    """
    state: Any = find_state(opt_state, LOCAL_STATES, method="agn or optperm.diloco")
    if final and (steps := int(local_values(state.since_commit).max())):
        raise ValueError(
            f"The center lacks all or part of the steps since the last full commit ({steps}): pass "
            'commit=True in the last step, or call update once more with commit="only".'
        )
    return state.center if params is None else fill_masked(state.center, params)
