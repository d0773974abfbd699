"""SGPerm: train a network by permuting its initial weights.

Y. Qiu and R. Suda, "Permute to Train: A New Dimension to Training Deep Neural Networks",
arXiv 2003.02570, 2020.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.export import register_namedtuple_serialization

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype
from optperm.core.schedules import resolve_schedule
from optperm.core.transformation import transformation
from optperm.permutation._permute_by_cycles import permute_by_cycles
from optperm.permutation._weight_vectors import OutputAxes

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree

# The share of the aggressiveness left after `num_steps`, and the steps to half of it without.
_LEFT, _HALVING = 1 / 100, 100.0


@functools.partial(register_namedtuple_serialization, serialized_name="optperm.RecommendationState")
class RecommendationState(NamedTuple):
    """State of the first half of `sgperm`.

    Attributes:
      count: Steps taken.
      recommendation: m, the running recommendation at each location.
      steps_past_end: Steps taken after `num_steps`, all with the last aggressiveness; 0 without it.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    recommendation: PyTree[Float[Array, "?*shape"], "Params"]
    steps_past_end: Int32[Array, ""]


def sgperm(
    aggressiveness: optax.ScalarOrSchedule = 0.1,
    aggressiveness_decay: float | None = None,
    min_aggressiveness: float = 0.0,
    partition_ratio: optax.ScalarOrSchedule = 1.0,
    partition_growth: float = 1.0,
    max_partition_ratio: float = 1.0,
    learning_rate: optax.ScalarOrSchedule = 0.01,
    momentum: float = 0.9,
    *,
    num_steps: int | None = None,
    min_partition_size: int = 10,
    include_remainder: bool = True,
    centralize: bool = False,
    seed: int | jax.Array = 0,
    output_axes: OutputAxes = (-1,),
) -> optax.GradientTransformationExtraArgs:
    r"""Train a network only by permuting its initial weights (SGPerm).

    Step :math:`t = 1, 2, \dots` takes

    .. math::
      m_t = \eta g_t + \mu m_{t-1}, \qquad
      \alpha_t = \max(\alpha_0 d_t, \alpha_{\min}), \qquad
      \lambda_t = \min(\lambda_0 \beta_2^t, \lambda_{\max})

    and then permutes each weight vector as :math:`m_t` recommends, by `permute_by_cycles` with
    :math:`\alpha_t` and :math:`\lambda_t`. The decay :math:`d_t` of the aggressiveness is

    .. math::
      d_t = 100^{-\min(t, T) / T} \text{ with num_steps } T, \qquad
      d_t = \beta_1^t \text{ with aggressiveness_decay } \beta_1, \qquad
      d_t = \frac{1}{1 + t / 100} \text{ without both.}

    The recommendation stays with the location, not with the weight. The network keeps its initial
    weights, bit for bit, in another order.

    Args:
      aggressiveness: :math:`\alpha_0 \ge 0`: a weight moves by at most about this share of its
        weight vector's range. A schedule of the step takes the place of the decay.
      aggressiveness_decay: :math:`\beta_1 \ge 0`, the factor on the aggressiveness, each step, in
        place of the decays above.
      min_aggressiveness: :math:`\alpha_{\min} \ge 0`, its lower bound. With whole weight vectors as
        subsets, small values stop all moves; `share_moved` in the state says so:
        `optax.tree.get(opt_state, "share_moved")`.
      partition_ratio: :math:`\lambda_0 \in [0, 1]`: the share of a weight vector in one subset. A
        schedule of the step takes the place of the growth.
      partition_growth: :math:`\beta_2 \ge 0`, the factor on the partition ratio, each step.
      max_partition_ratio: :math:`\lambda_{\max} \in [0, 1]`, its upper bound.
      learning_rate: :math:`\eta`, the factor on the newest gradient, a number or a schedule of the step.
      momentum: :math:`\mu \in [0, 1]`, the factor on the last recommendation.
      num_steps: :math:`T \ge 1`, the updates of the whole run: epochs times the batches of an epoch,
        and inside `optax.MultiSteps(..., k)` a k-th of these. Later updates take the last
        aggressiveness; `steps_past_end` in the state counts them.
      min_partition_size: The minimum number of entries in a subset.
      include_remainder: Whether a smaller last subset takes part.
      centralize: Whether to subtract from the recommendation a random pivot near its mean over the
        weight vector: see `permute_by_cycles`. It is not in the paper.
      seed: Seed of the random partitions.
      output_axes: As in `permute_by_cycles`.

    Returns:
      A transformation. Its `update` needs `params`.

    Example:
      >>> import jax, jax.numpy as jnp, optperm
      >>> x = jax.random.normal(jax.random.key(0), (64, 8))
      >>> y = x @ jnp.linspace(-1.0, 1.0, 8)
      >>> loss_fn = lambda w: jnp.mean((x @ w - y) ** 2)
      >>> start = jax.random.permutation(jax.random.key(1), jnp.linspace(-1.0, 1.0, 8))
      >>> tx = optperm.sgperm(aggressiveness=0.3, momentum=0.0, num_steps=50)
      >>> w, opt_state = start, tx.init(start)
      >>> for _ in range(50):
      ...     updates, opt_state = tx.update(jax.grad(loss_fn)(w), opt_state, w)
      ...     w = optperm.apply_updates(w, updates, opt_state)
      >>> bool(loss_fn(w) < 0.1 * loss_fn(start))
      True
      >>> bool(jnp.all(jnp.sort(w) == jnp.sort(start)))
      True

    Notes:
      Pass `num_steps` where the length of the run is known: it trains best. The original's rule is
      `aggressiveness_decay=0.99`, by which hardly a weight moves after some 500 steps. Initialize biases
      at random, or train them with another optimizer (`optax.partition`).

      Weights of v evenly spaced values move only while :math:`\alpha_t` is above about 1 / (v - 1), so
      the aggressiveness must not decay: pass `aggressiveness=1.0`, `aggressiveness_decay=1.0` and a
      momentum of .99 or .999. A schedule of `aggressiveness` given by `optax.inject_hyperparams` is a
      number to `sgperm`, and decays as well unless `aggressiveness_decay=1.0`.

      Only the sign and the order of the recommendation matter. So the learning rate has an effect only
      as a schedule, and where its product with a gradient is too small for the dtype of the params: for
      float16 take 1.0. The recommendation has the dtype of the params. In bfloat16 a momentum of .999 or
      more rounds to 1, and old gradients are never forgotten: take .99, or params in float32. An entry
      whose gradient is not finite sits out the step and keeps its recommendation.

      It must be the last of its chain. Gradients may be changed before it (clipped, averaged over
      replicas), but a transformation after it, such as weight decay, would break the permutation;
      `optperm.apply_updates` warns about it.

      Test accuracy after 3 epochs of 1,200 steps on MNIST (an MLP with 256 hidden units, batches of 50),
      and after 10 epochs of 25 on the digits: with `num_steps` and `centralize` .968 and .981, and
      without these .959 and .977; by :math:`.99^t` .942 and .981. Other decays without a length lost on
      one of the two: :math:`1 / (1 + t / 50)` has .954 and .982, :math:`(1 + t / 10)^{-.6}` .955 on
      MNIST, and :math:`1 / \sqrt{1 + t / 30}` .970 on the digits.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or more than one of a schedule of the aggressiveness,
        `aggressiveness_decay` and `num_steps` is given.

    References:
      Qiu and Suda, `Permute to Train: A New Dimension to Training Deep Neural Networks
      <https://arxiv.org/abs/2003.02570>`_, 2020
    """
    infinity, decay = float("inf"), 1.0 if aggressiveness_decay is None else aggressiveness_decay
    for name, number, high in (
        ("aggressiveness_decay", decay, infinity),
        ("min_aggressiveness", min_aggressiveness, infinity),
        ("partition_growth", partition_growth, infinity),
        ("max_partition_ratio", max_partition_ratio, 1.0),
    ):
        checks.check_in_range(name, number, 0.0, high, may_be_schedule=False)
    checks.check_in_range("aggressiveness", aggressiveness, 0.0, infinity)
    checks.check_in_range("partition_ratio", partition_ratio, 0.0, 1.0)
    if num_steps is not None:
        checks.check_count("num_steps", num_steps)
    if callable(aggressiveness) + (aggressiveness_decay is not None) + (num_steps is not None) > 1:
        raise ValueError(
            "Pass one of num_steps, aggressiveness_decay, a schedule of aggressiveness."
        )

    def decay_aggressiveness(count: jax.Array) -> jax.Array:
        # alpha_t = max(alpha_0 d_t, alpha_min)
        alpha, t = jnp.asarray(aggressiveness, jnp.float32), (count + 1).astype(jnp.float32)
        if aggressiveness_decay is not None:
            alpha = _scale_geometrically(aggressiveness, aggressiveness_decay, count)
        elif num_steps is not None:
            alpha *= _LEFT ** jnp.minimum(t / jnp.asarray(num_steps, jnp.float32), 1.0)
        else:
            alpha /= 1.0 + t / _HALVING
        return jnp.maximum(alpha, jnp.asarray(min_aggressiveness, jnp.float32))

    def grow_partition_ratio(count: jax.Array) -> jax.Array:
        # lambda_t = min(lambda_0 beta_2^t, lambda_max)
        return jnp.minimum(
            _scale_geometrically(partition_ratio, partition_growth, count),
            jnp.asarray(max_partition_ratio, jnp.float32),
        )

    return optax.chain(
        _recommend(learning_rate, momentum, num_steps),
        permute_by_cycles(
            aggressiveness if callable(aggressiveness) else decay_aggressiveness,
            partition_ratio if callable(partition_ratio) else grow_partition_ratio,
            min_partition_size=min_partition_size,
            include_remainder=include_remainder,
            centralize=centralize,
            seed=seed,
            output_axes=output_axes,
        ),
    )


def _recommend(
    learning_rate: optax.ScalarOrSchedule, momentum: float, num_steps: int | None
) -> optax.GradientTransformationExtraArgs:
    """Keep the running recommendation m <- learning_rate * g + momentum * m."""
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("momentum", momentum, 0.0, 1.0, may_be_schedule=False)

    def init(params: optax.Params) -> RecommendationState:
        return RecommendationState(
            count=jnp.zeros([], jnp.int32),
            recommendation=optax.tree.zeros_like(params),
            steps_past_end=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: optax.Updates, state: RecommendationState, params: optax.Params, **_: Any
    ) -> tuple[optax.Updates, RecommendationState]:
        del params

        def recommend(g: jax.Array, m: jax.Array) -> jax.Array:
            dtype = accumulation_dtype((g, m))
            rate = resolve_schedule("learning_rate", learning_rate, state.count, dtype)
            scaled, kept = rate * jnp.asarray(g, dtype), m.astype(dtype)
            return (scaled + jnp.asarray(momentum, dtype) * kept).astype(m.dtype)

        # m <- eta g + mu m
        m = jax.tree.map(recommend, grads, state.recommendation)
        # Without the barrier XLA computes m twice, and copies the old m that it would overwrite.
        m = jax.lax.optimization_barrier(m)
        # Where m is not finite its entry sits out the step, and the state keeps the old m.
        kept = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(new), new, old), m, state.recommendation
        )
        t, past = optax.safe_increment(state.count), jnp.zeros_like(state.steps_past_end)
        if num_steps is not None:
            past = jnp.maximum(t - jnp.asarray(num_steps, jnp.int32), 0)
        return m, RecommendationState(t, kept, past)

    return transformation(init, update, method="sgperm", like=lambda s: s.recommendation)


def _scale_geometrically(start: Any, factor: Any, count: jax.Array) -> jax.Array:
    """Return start * factor^(count + 1): the first step uses the updated value."""
    power = jnp.asarray(factor, jnp.float32) ** (count + 1).astype(jnp.float32)
    return jnp.asarray(start, jnp.float32) * power
