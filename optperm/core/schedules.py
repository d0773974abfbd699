"""Resolve numbers that may be schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks


def resolve_schedule(
    name: str,
    number: optax.ScalarOrSchedule,
    count: jax.Array,
    dtype: Any = jnp.float32,
    *,
    low: float = 0.0,
    high: float = float("inf"),
) -> jax.Array:
    """Return a number, or the value of a schedule at a step, as an array of the given dtype.

    Args:
      name: The argument's name, for messages.
      number: The number, or the schedule.
      count: The step.
      dtype: The dtype of the result.
      low: The minimum allowed value. A traced value is clipped to the limits.
      high: The maximum allowed value.

    Raises:
      TypeError: If the schedule does not return a single real number; the message names the argument.
      ValueError: If a concrete value is out of range at this step; the message names the argument.
    """
    if callable(number):
        value = number(count)
        what = f"The value of the schedule {name}"
        kind = checks.dtype_of(what, value)
        if jnp.ndim(value) or not checks.is_real(kind):
            came = f"{kind}{list(jnp.shape(value))}"
            raise TypeError(f"{what} must be a single real number, got {came}.")
        if not isinstance(value, jax.core.Tracer):
            checks.check_in_range(what, float(value), low, high)
        number = value
    # A traced value out of range cannot raise an error, so it is clipped to the limits.
    number = jnp.asarray(number, dtype)
    return jnp.clip(number, jnp.asarray(low, dtype), None if np.isinf(high) else high)
