"""SGPerm: train a network by permuting its initial weights.

Y. Qiu and R. Suda, "Permute to Train: A New Dimension to Training Deep Neural Networks",
arXiv 2003.02570, 2020.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.export import register_namedtuple_serialization

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, computed_once
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Int32, Params, PyTree, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.transformation import transformation
from optperm.permutation._permute_by_cycles import permute_by_cycles

# The initial aggressiveness of the default schedule.
_START = 0.1
# The ratio of the last to the initial value with `num_steps`; without, the steps to half the value.
_LEFT, _HALVING = 1 / 100, 100.0


@functools.partial(register_namedtuple_serialization, serialized_name="optperm.RecommendationState")
class RecommendationState(NamedTuple):
    """State of the first half of `sgperm`.

    Attributes:
      count: Number of steps taken.
      recommendation: m, the running recommendation at each location.
      steps_past_end: Number of steps taken after the first `num_steps`; 0 without `num_steps`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    recommendation: PyTree[Float[Array, "?*shape"], "Params"]
    steps_past_end: Int32[Array, ""]

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if `sgperm` is past its `num_steps`.

        Args:
          params: Not used.
        """
        del params
        if not can_be_seen(self.steps_past_end) or not np.any(np.asarray(self.steps_past_end) > 0):
            return []
        return [
            "sgperm is past its num_steps: it continues with the last aggressiveness. Pass the number "
            "of updates of the whole run as num_steps."
        ]


def sgperm(
    aggressiveness: optax.ScalarOrSchedule | None = None,
    partition_ratio: optax.ScalarOrSchedule = 1.0,
    learning_rate: optax.ScalarOrSchedule = 0.01,
    momentum: float = 0.9,
    *,
    num_steps: int | None = None,
    min_partition_size: int = 10,
    include_remainder: bool = True,
    centralize: bool = False,
    key: int | jax.Array = 0,
    axes: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Train a network only by permuting its initial weights (SGPerm).

    Step :math:`t = 0, 1, \dots` takes

    .. math::
      m_{t+1} = \eta g_t + \mu m_t

    Then `permute_by_cycles` permutes each weight vector as the recommendation :math:`m_{t+1}` requires,
    with the aggressiveness :math:`\alpha_t` and the partition ratio :math:`\lambda_t`.

    The recommendation belongs to the position, not to the weight. The network keeps its initial weights,
    bit for bit, in another order.

    Args:
      aggressiveness: :math:`\alpha_t \ge 0`. A weight moves by at most this fraction of its weight
        vector's range plus, in a subset of s entries, 1 / s of the range (about the distance between two
        neighbors). A number, a schedule, or None for the decreasing schedule
        `optperm.permutation.falling(0.1, num_steps)`. If a subset is a whole weight vector, small values
        allow hardly any moves; `optax.tree.get(opt_state, "fraction_moved")` shows this.
      partition_ratio: :math:`\lambda_t \in [0, 1]`, the fraction of a weight vector in one subset, a
        number or a schedule.
      learning_rate: :math:`\eta`, the factor that multiplies the current gradient, a number or a
        schedule.
      momentum: :math:`\mu \in [0, 1]`, the factor that multiplies the last recommendation.
      num_steps: The number of updates of the whole run, over which the aggressiveness falls. This is the
        number of epochs times the batches per epoch, divided by k inside `optax.MultiSteps(..., k)`.
        Later updates use the last aggressiveness, and `steps_past_end` in the state counts them.
      min_partition_size: The minimum number of entries in a subset.
      include_remainder: Whether to include a smaller last subset.
      centralize: Whether to subtract a random pivot from the recommendation, near its mean over the
        weight vector (see `permute_by_cycles`). The paper does not do this.
      key: The random key of the partitions and pivots, or an int as its seed.
      axes: What each leaf is, as in `permute_by_cycles`.

    Returns:
      A transformation. Its `update` needs `params`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (64, 8))
      >>> y = x @ jnp.linspace(-1.0, 1.0, 8)
      >>> loss_fn = lambda w: jnp.mean((x @ w - y) ** 2)
      >>> start = jax.random.permutation(jax.random.key(1), jnp.linspace(-1.0, 1.0, 8))
      >>> tx = optperm.sgperm(optperm.permutation.falling(0.3, num_steps=50), momentum=0.0)
      >>> @jax.jit
      ... def step(w, opt_state):
      ...     updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
      ...     return optperm.apply_updates(w, updates, opt_state), opt_state
      >>> w, opt_state = start, tx.init(start)
      >>> for _ in range(50):
      ...     w, opt_state = step(w, opt_state)
      >>> bool(loss_fn(w) < 0.1 * loss_fn(start))
      True
      >>> bool(jnp.all(jnp.sort(w) == jnp.sort(start)))
      True

      The schedules of the paper, :math:`\max(\alpha_0 \beta_1^{t+1}, \alpha_{\min})` and
      :math:`\min(\lambda_0 \beta_2^{t+1}, \lambda_{\max})`:

      >>> falls = optax.exponential_decay(0.1 * 0.99, 1, 0.99, end_value=0.001)
      >>> grows = optax.exponential_decay(0.25 * 1.01, 1, 1.01, end_value=1.0)
      >>> tx = optperm.sgperm(falls, grows)

    Notes:
      If you know the length of the run, pass `num_steps`. With the paper's decay of 0.99 per step,
      hardly any weights move after about 500 steps. Initialize biases at random, or train them with
      another optimizer (`optax.partition`). Nothing may change the updates after SGPerm in its chain.

      Weights with v evenly spaced values move only if :math:`\alpha_t` is above about 1 / (v - 1), so
      the aggressiveness must stay above this value. Pass `aggressiveness=1.0` and a momentum of 0.99 or
      0.999.

      Only the sign and the order of the recommendation matter. The learning rate therefore has an effect
      only as a schedule, or if its product with a gradient is too small or too large for the dtype of
      the params. Use 1.0 for float16. In bfloat16, a recommendation times 0.999 or more rounds to itself
      and never forgets old gradients: use a momentum of 0.99, or float32 params.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, or both `aggressiveness` and `num_steps` are given.

    References:
      Qiu and Suda, `Permute to Train: A New Dimension to Training Deep Neural Networks
      <https://arxiv.org/abs/2003.02570>`_, 2020
    """
    if aggressiveness is None:
        aggressiveness = falling(_START, num_steps)
    elif num_steps is not None:
        raise ValueError(
            "Pass aggressiveness or num_steps, not both: to start at a value other than 0.1, pass "
            "aggressiveness=optperm.permutation.falling(start, num_steps)."
        )
    return optax.chain(
        _recommend(learning_rate, momentum, num_steps),
        permute_by_cycles(
            aggressiveness,
            partition_ratio,
            min_partition_size=min_partition_size,
            include_remainder=include_remainder,
            centralize=centralize,
            key=key,
            axes=axes,
        ),
    )


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


def _recommend(
    learning_rate: optax.ScalarOrSchedule, momentum: float, num_steps: int | None
) -> optax.GradientTransformationExtraArgs:
    """Make the transformation m <- learning_rate * g + momentum * m, the running recommendation."""
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("momentum", momentum, 0.0, 1.0, may_be_schedule=False)

    def init(params: Params) -> RecommendationState:
        return RecommendationState(
            count=jnp.zeros([], jnp.int32),
            recommendation=optax.tree.zeros_like(params),
            steps_past_end=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: Updates, state: RecommendationState, params: Params, **_: Any
    ) -> tuple[Updates, RecommendationState]:
        del params

        def recommend(g: jax.Array, m: jax.Array) -> jax.Array:
            dtype = accumulation_dtype((g, m))
            rate = resolve_schedule("learning_rate", learning_rate, state.count, dtype)
            scaled, kept = rate * jnp.asarray(g, dtype), m.astype(dtype)
            return (scaled + jnp.asarray(momentum, dtype) * kept).astype(m.dtype)

        # m <- eta g + mu m
        m = computed_once(jax.tree.map(recommend, grads, state.recommendation))
        # An entry whose m is not finite is excluded from the step, and the state keeps its old m.
        kept = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(new), new, old), m, state.recommendation
        )
        t, past = optax.safe_increment(state.count), jnp.zeros_like(state.steps_past_end)
        if num_steps is not None:
            past = jnp.maximum(t - jnp.asarray(num_steps, jnp.int32), 0)
        return m, RecommendationState(count=t, recommendation=kept, steps_past_end=past)

    return transformation(
        init, update, method="sgperm", like=lambda s: s.recommendation, dtypes=True
    )
