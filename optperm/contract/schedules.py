"""Numbers that may be schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks


def resolve_schedule(
    name: str, number: optax.ScalarOrSchedule, count: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """A number, or the value of a schedule at a step, as an array of the given dtype.

    Raises:
      TypeError: Naming the argument whose schedule gives something else than one real number.
    """
    if not callable(number):
        return jnp.asarray(number, dtype)
    value = number(count)
    kind = checks.dtype_of(f"what the schedule {name} returns", value)
    is_real = jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
    if not is_real or jnp.ndim(value):
        raise TypeError(
            f"What the schedule {name} returns must be a single real number, got "
            f"{kind}{list(jnp.shape(value))}."
        )
    return jnp.asarray(value, dtype)
