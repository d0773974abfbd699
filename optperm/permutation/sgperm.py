"""SGPerm: training a network by permuting its initial weights.

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

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.keys import as_key, key_data
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.schedules import resolve_schedule
from optperm.contract.transformation import transformation
from optperm.permutation import cycles
from optperm.permutation.weight_vectors import (
    OutputAxes,
    check_output_axes,
    init_ranks,
    permute_vectors,
    warn_of_constant_vectors,
)
from optperm.placement import Placement

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree, UInt32

# What is left of the aggressiveness after `num_steps`, and the steps in which it halves without.
_LEFT, _HALVING = 1 / 100, 100.0


@functools.partial(
    register_namedtuple_serialization, serialized_name="optperm.PermuteByCyclesState"
)
class PermuteByCyclesState(NamedTuple):
    """State of `permute_by_cycles`.

    Attributes:
      count: Steps taken.
      key: Data of the threefry key from which every partition is drawn.
      weights: The exact weights, a permutation of the initial ones in each weight vector.
      ranks: The rank of each weight among those of its weight vector.
      share_moved: The share of all weights that the last step moved.
      mismatches: Steps that were given other params than the weights to which the step before led, by
        more than rounding: something else moves the params, and they are no permutation.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    weights: PyTree[Float[Array, "?*shape"], "Params"]
    ranks: PyTree[Int32[Array, "?*shape"], "Params"]
    share_moved: Float32[Array, ""]
    mismatches: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """The exact weights; scalars, which are not permuted, are not placed either."""
        targets = jax.tree.map(lambda w: w if w.ndim else optax.MaskedNode(), self.weights)
        return [(targets, True)]

    def replace_targets(self, other: "PermuteByCyclesState") -> "PermuteByCyclesState":
        """This state with the weights of another permutation of the same ones.

        Args:
          other: One that holds them, whose mismatches are taken with them.
        """
        return self._replace(weights=other.weights, ranks=other.ranks, mismatches=other.mismatches)


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


def permute_by_cycles(
    aggressiveness: optax.ScalarOrSchedule,
    partition_ratio: optax.ScalarOrSchedule,
    *,
    min_partition_size: int = 10,
    include_remainder: bool = True,
    centralize: bool = False,
    seed: int | jax.Array = 0,
    output_axes: OutputAxes = (-1,),
) -> optax.GradientTransformationExtraArgs:
    r"""Permutes each weight vector along cycles in which every weight moves as recommended.

    The updates that come in are a recommendation :math:`m`: negative where the weight should rise,
    positive where it should fall. A weight vector is all weights that enter one output unit, with
    :math:`n` entries and :math:`A = \max - \min`. One step, for each:

    1. Cut it at random into disjoint subsets of
       :math:`P = \max(P_{\min}, \lfloor \lambda n \rfloor)` entries, the last one smaller. Entries whose
       recommendation is zero or not finite sit out, which leaves :math:`s` of a subset.
    2. A weight :math:`w` may move to the place of any in :math:`[w, w + \epsilon)` if it should rise, in
       :math:`[w - \epsilon, w)` if it should fall, with :math:`\epsilon = A (\alpha + 1/s)`.
    3. In descending order of :math:`|m|`, find from each entry a cycle of such moves through entries
       that are in no cycle yet: depth first, nearest weight first. Every entry on it moves one on.

    So each weight vector keeps its values bit for bit, and every moved weight moved the way its
    recommendation asked, by at most :math:`\epsilon`. Scalars are left alone.

    It computes updates from targets that it keeps in its state: nothing may follow it in a chain.
    Apply the updates with `optperm.apply_updates` to place weights bit for bit; with
    `optax.apply_updates` they are within one rounding of it, without ever drifting.

    Args:
      aggressiveness: :math:`\alpha \ge 0`, a number or a schedule of the step.
      partition_ratio: :math:`\lambda \in [0, 1]`, a number or a schedule of the step.
      min_partition_size: :math:`P_{\min} \ge 1`, in entries.
      include_remainder: Whether a last subset of fewer than :math:`P` entries takes part.
      centralize: Whether :math:`m` less a pivot is followed: :math:`\bar m + z \sigma / 2` with the mean
        and standard deviation of the weight vector's :math:`m`, and :math:`z \sim N(0, 1)` drawn in each
        step. No permutation can follow the mean, since all have the same sum; and of two weights that
        should rise, that which should more can pass the other when the pivot lies between them. Entries
        whose :math:`m` is zero then take part; platforms may round the pivot differently.
      seed: Seed of the random partitions. The same seed gives the same training on every platform.
      output_axes: The axes of a parameter that index output units: an integer or several, or a
        function from a path such as "Dense_0/kernel" and the parameter to them. Parameters of rank 1
        are one weight vector.

    Returns:
      A transformation whose state is a `PermuteByCyclesState`. Its `update` needs `params`.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or the trees passed to `update` do not match.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> params = {"bias": jnp.array([0.5, -0.5, 0.0, 0.25])}
      >>> tx = optperm.permute_by_cycles(aggressiveness=1.0, partition_ratio=1.0)
      >>> opt_state = tx.init(params)
      >>> wishes = {"bias": jnp.array([0.0, -2.0, 1.0, 1.0])}  # the second up, the last two down
      >>> updates, opt_state = tx.update(wishes, opt_state, params)
      >>> optperm.apply_updates(params, updates, opt_state)["bias"].tolist()
      [0.5, 0.0, -0.5, 0.25]
      >>> float(opt_state.share_moved)
      0.5

    References:
      Qiu and Suda, `Permute to Train: A New Dimension to Training Deep Neural Networks
      <https://arxiv.org/abs/2003.02570>`_, 2020
    """
    checks.check_in_range("aggressiveness", aggressiveness, 0.0, float("inf"))
    checks.check_in_range("partition_ratio", partition_ratio, 0.0, 1.0)
    checks.check_count("min_partition_size", min_partition_size)
    checks.check_flag("include_remainder", include_remainder)
    checks.check_flag("centralize", centralize)
    checks.check_seed("seed", seed)
    check_output_axes(output_axes)

    def init(params: optax.Params) -> PermuteByCyclesState:
        warn_of_constant_vectors(params, output_axes, example="optperm.sgperm()")
        return PermuteByCyclesState(
            count=jnp.zeros([], jnp.int32),
            key=key_data(seed),
            weights=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            ranks=init_ranks(params, output_axes),
            # Of the type that an update gives them, for a scan inside `jax.shard_map`.
            share_moved=mark_varying(jnp.zeros([], jnp.float32), varying_axes(params)),
            mismatches=mark_varying(jnp.zeros([], jnp.int32), varying_axes(params)),
        )

    def update(
        m: optax.Updates, state: PermuteByCyclesState, params: optax.Params, **_: Any
    ) -> tuple[optax.Updates, PermuteByCyclesState]:
        alpha = resolve_schedule("aggressiveness", aggressiveness, state.count)
        ratio = resolve_schedule("partition_ratio", partition_ratio, state.count, high=1.0)
        key = as_key(state.key)
        step_key = jax.random.fold_in(key, state.count)
        moved: list[jax.Array] = []

        def permute(
            index: int, w: jax.Array, ranks: jax.Array, m: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            # P = max(P_min, floor(lambda n)), and cycles of moves by less than A (alpha + 1 / s).
            size = _partition_size(ratio, w.shape[0], min_partition_size)
            leaf_key = jax.random.fold_in(step_key, index)
            m = _centralized(m, jax.random.fold_in(leaf_key, 1)) if centralize else m
            seeds = jax.random.bits(leaf_key, (*w.shape[1:], 2), jnp.uint32)
            w, ranks, num_moved = cycles.permute_rows(
                m, w, ranks, seeds, alpha, size, drop_remainder=not include_remainder
            )
            moved.append(jnp.sum(num_moved).astype(jnp.float32))
            return w, ranks

        # The params are compared before the kernel writes over the weights, or XLA would copy these.
        is_mismatch, weights = jax.lax.optimization_barrier(
            (_are_elsewhere(params, state.weights), state.weights)
        )
        weights, ranks = permute_vectors(permute, output_axes, weights, state.ranks, m)
        size = sum(leaf.size for leaf in jax.tree.leaves(weights) if leaf.ndim)
        is_counted = is_mismatch & (state.mismatches < jnp.iinfo(jnp.int32).max)
        new_state = state._replace(
            count=optax.safe_increment(state.count),
            weights=weights,
            ranks=ranks,
            share_moved=sum(moved, start=jnp.zeros([], jnp.float32)) / max(size, 1),
            mismatches=state.mismatches + is_counted.astype(jnp.int32),
        )
        return optax.tree.sub(weights, params), new_state

    return transformation(init, update, method="permute_by_cycles", like=lambda s: s.weights)


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
    r"""SGPerm: trains a network only by permuting its initial weights.

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

    The first is for a run whose length is known, and the best of the three. The second is the original's
    rule, with :math:`\beta_1 = .99`: after some 500 steps hardly a weight moves any more. See the notes.

    The network's weights stay those it was initialized with, bit for bit, in another order; biases
    included, so initialize them at random or train them with another optimizer (`optax.partition`).

    The recommendation stays with the location, not with the weight. Only its sign and its order matter,
    so the learning rate has no effect but beside a momentum that changes, and where its product with a
    gradient is too small for the dtype of the params: for float16 take 1.0. An entry whose gradient is
    not finite sits out the step and keeps its recommendation.

    It is a whole optimizer and the last of its chain: gradients may be changed before it (clipped,
    averaged over replicas), but what follows it, weight decay for instance, would break the permutation;
    `optperm.apply_updates` warns of it.

    Args:
      aggressiveness: :math:`\alpha_0 \ge 0`: a weight moves by at most about this share of its
        weight vector's range. A schedule of the step takes the place of the decay.
      aggressiveness_decay: :math:`\beta_1 \ge 0`, the factor on the aggressiveness, each step, in
        place of the decays above.
      min_aggressiveness: :math:`\alpha_{\min} \ge 0`, to which it falls. With whole weight vectors as
        subsets, small values jam: see `share_moved` in the state.
      partition_ratio: :math:`\lambda_0 \in [0, 1]`: the share of a weight vector in one subset. A
        schedule of the step takes the place of the growth.
      partition_growth: :math:`\beta_2 \ge 0`, the factor on the partition ratio, each step.
      max_partition_ratio: :math:`\lambda_{\max} \in [0, 1]`, to which it grows.
      learning_rate: :math:`\eta`, the weight of the newest gradient, a number or a schedule of the step.
      momentum: :math:`\mu \in [0, 1]`, the weight of the last recommendation in the next one.
      num_steps: :math:`T \ge 1`, the steps of the whole run: epochs times the batches of an epoch.
        Steps after it take the last aggressiveness, and are counted as `steps_past_end` in the state.
      min_partition_size: The least entries in a subset.
      include_remainder: Whether a last subset that is smaller takes part.
      centralize: Whether the recommendation less a random pivot near its mean over the weight vector is
        followed: see `permute_by_cycles`. It is not in the paper.
      seed: Seed of the random partitions.
      output_axes: As in `permute_by_cycles`.

    Returns:
      A transformation. Its `update` needs `params`.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or more than one of a schedule of the aggressiveness,
        `aggressiveness_decay` and `num_steps` is given.

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

    References:
      Qiu and Suda, `Permute to Train: A New Dimension to Training Deep Neural Networks
      <https://arxiv.org/abs/2003.02570>`_, 2020

    Notes:
      Test accuracy after 3 epochs of 1,200 steps on MNIST (an MLP with 256 hidden units, batches of 50),
      and after 10 epochs of 25 on the digits: with `num_steps` and `centralize` .968 and .981, and
      without these .959 and .977; by :math:`.99^t` .942 and .981. Other decays without a length lost on
      one of the two: :math:`1 / (1 + t / 50)` has .954 and .982, :math:`(1 + t / 10)^{-.6}` .955 on
      MNIST, and :math:`1 / \sqrt{1 + t / 30}` .970 on the digits.
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
            "How the aggressiveness falls is said more than once: pass one of num_steps, "
            "aggressiveness_decay and a schedule as the aggressiveness."
        )

    def decayed(count: jax.Array) -> jax.Array:
        alpha, t = jnp.asarray(aggressiveness, jnp.float32), (count + 1).astype(jnp.float32)
        if aggressiveness_decay is not None:
            alpha = _geometric(aggressiveness, aggressiveness_decay, count)
        elif num_steps is not None:
            alpha *= _LEFT ** jnp.minimum(t / jnp.asarray(num_steps, jnp.float32), 1.0)
        else:
            alpha /= 1.0 + t / _HALVING
        return jnp.maximum(alpha, jnp.asarray(min_aggressiveness, jnp.float32))

    def grown(count: jax.Array) -> jax.Array:
        return jnp.minimum(
            _geometric(partition_ratio, partition_growth, count),
            jnp.asarray(max_partition_ratio, jnp.float32),
        )

    return optax.chain(
        _recommend(learning_rate, momentum, num_steps),
        permute_by_cycles(
            aggressiveness if callable(aggressiveness) else decayed,
            partition_ratio if callable(partition_ratio) else grown,
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
    """Keeps the running recommendation m <- learning_rate * g + momentum * m.

    Where that is not finite the recommendation passed on is not either, so that the entry sits out the
    step, and the one kept is the old one. Steps after `num_steps` are counted.
    """
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
        # Otherwise XLA computes it again for what is kept, and copies what it would overwrite.
        m = jax.lax.optimization_barrier(m)
        kept = jax.tree.map(
            lambda new, old: jnp.where(jnp.isfinite(new), new, old), m, state.recommendation
        )
        t, past = optax.safe_increment(state.count), state.steps_past_end
        if num_steps is not None:
            past = jnp.maximum(t - jnp.asarray(num_steps, jnp.int32), 0)
        return m, RecommendationState(t, kept, past)

    return transformation(init, update, method="sgperm", like=lambda s: s.recommendation)


def _are_elsewhere(params: optax.Params, weights: optax.Params) -> jax.Array:
    """Whether params are farther from weights than rounding in a step to these may have left them."""

    def is_elsewhere(p: jax.Array, w: jax.Array) -> jax.Array:
        wide = accumulation_dtype(w)
        largest = jnp.max(jnp.abs(w), initial=0.0).astype(wide)
        distance = jnp.max(jnp.abs(p.astype(wide) - w.astype(wide)), initial=0.0)
        return ~(distance <= 4 * jnp.finfo(w.dtype).eps.astype(wide) * largest)

    # Scalars are left to whatever moves them.
    found = jax.tree.map(lambda p, w: is_elsewhere(p, w) if w.ndim else False, params, weights)
    return functools.reduce(jnp.logical_or, jax.tree.leaves(found), jnp.zeros([], jnp.bool_))


def _centralized(m: jax.Array, key: jax.Array) -> jax.Array:
    """Return m, (n, *outputs), less mean + z / 2 std of each weight vector, z standard normal."""
    wide = m.astype(accumulation_dtype(m))
    mean, std = (f(wide, 0, where=jnp.isfinite(wide), keepdims=True) for f in (jnp.mean, jnp.std))
    z = jax.random.normal(key, std.shape, wide.dtype)
    return (wide - mean - 0.5 * z * std).astype(m.dtype)


def _geometric(start: Any, factor: Any, count: jax.Array) -> jax.Array:
    """Start * factor^(count + 1): the value is updated before it is used."""
    power = jnp.asarray(factor, jnp.float32) ** (count + 1).astype(jnp.float32)
    return jnp.asarray(start, jnp.float32) * power


def _partition_size(ratio: jax.Array, n: int, minimum: int | jax.Array) -> jax.Array:
    """P = max(P_min, floor(ratio * n)), and no more than n."""
    return jnp.clip(
        jnp.floor(ratio * n).astype(jnp.int32), jnp.minimum(jnp.asarray(minimum, jnp.int32), n), n
    )
