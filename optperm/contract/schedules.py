"""Numbers that may be schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract import checks


def resolve_schedule(
    name: str,
    number: optax.ScalarOrSchedule,
    count: jax.Array,
    dtype: Any = jnp.float32,
    *,
    low: float = 0.0,
    high: float = float("inf"),
) -> jax.Array:
    """A number, or the value of a schedule at a step, as an array of the given dtype.

    Args:
      name: The argument's name, for messages.
      number: The number, or the schedule.
      count: The step.
      dtype: What to give it in.
      low: The least value allowed. Where Python cannot see the value it is moved to the nearest one
        allowed.
      high: The largest one.

    Raises:
      TypeError: Naming the argument whose schedule gives something else than one real number.
      ValueError: Naming the argument that is seen to be out of range at this step.
    """
    value = number(count) if callable(number) else number
    if callable(number):
        kind = checks.dtype_of(f"what the schedule {name} returns", value)
        is_real = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
        if not is_real or jnp.ndim(value):
            raise TypeError(
                f"What the schedule {name} returns must be a single real number, got "
                f"{kind}{list(jnp.shape(value))}."
            )
    value = jnp.asarray(value, dtype)
    if callable(number) and not isinstance(value, jax.core.Tracer):
        checks.check_in_range(f"What the schedule {name} returns", float(value), low, high)
    return jnp.clip(value, jnp.asarray(low, dtype), None if np.isinf(high) else high)
