"""Numbers that may be schedules."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def at_step(
    number: optax.ScalarOrSchedule, count: jax.Array, dtype: Any = jnp.float32
) -> jax.Array:
    """A number, or the value of a schedule at a step, as an array of the given dtype."""
    return jnp.asarray(number(count) if callable(number) else number, dtype)
