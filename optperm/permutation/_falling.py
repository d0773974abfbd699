"""A decreasing schedule for the aggressiveness of SGPerm."""

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks

# The ratio of the last to the initial value with `num_steps`; without, the steps to half the value.
_LEFT, _HALVING = 1 / 100, 100.0


def falling(
    init_value: float | jax.Array, num_steps: int | jax.Array | None = None
) -> optax.Schedule:
    r"""Make a decreasing schedule for the aggressiveness of `optperm.sgperm`.

    At the counts :math:`t = 0, 1, \dots`, the value is

    .. math::
      \alpha_0 \cdot 100^{-\min(t + 1, T) / T} \text{ with num_steps } T, \qquad
      \frac{\alpha_0}{1 + (t + 1) / 100} \text{ without.}

    Args:
      init_value: :math:`\alpha_0 \ge 0`, a number. The first step already takes a smaller value.
      num_steps: :math:`T \ge 1`, the number of steps of the whole run. Afterwards, the value stays at
        one hundredth of :math:`\alpha_0`.

    Returns:
      An Optax schedule, which maps a count, traced or not, to a float32 scalar.

    Example:
      >>> import optperm
      >>> schedule = optperm.permutation.falling(0.4, num_steps=4)
      >>> [round(float(schedule(count)), 4) for count in (0, 1, 3, 9)]
      [0.1265, 0.04, 0.004, 0.004]
      >>> round(float(optperm.permutation.falling(0.4)(99)), 4)
      0.2
      >>> tx = optperm.sgperm(schedule)

    Raises:
      TypeError: If `init_value` is not a number, or `num_steps` is not an integer.
      ValueError: If an argument is out of range.
    """
    checks.check_in_range("init_value", init_value, 0.0, float("inf"), may_be_schedule=False)
    if num_steps is not None:
        checks.check_count("num_steps", num_steps)

    def schedule(count: jax.typing.ArrayLike) -> jax.Array:
        alpha = jnp.asarray(init_value, jnp.float32)
        t = optax.safe_increment(jnp.asarray(count)).astype(jnp.float32)
        if num_steps is None:
            return alpha / (1.0 + t / _HALVING)
        return alpha * _LEFT ** jnp.minimum(t / jnp.asarray(num_steps, jnp.float32), 1.0)

    return schedule
