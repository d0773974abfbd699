"""AGN: local steps, and one commit a period of the accumulated, normalized gradient.

J. Hermans, G. Spanakis and R. Moeckel, "Accumulated Gradient Normalization", ACML 2017,
arXiv 1710.02368.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.mapped_axes import AxisName, cond
from optperm.contract.transformation import transformation
from optperm.distributed.commits import RULES, Center, Commit, Replicas, check_weight
from optperm.distributed.local_steps import (
    Period,
    advance_schedules,
    after_pull,
    center_step,
    check_can_be_pulled,
    check_period,
    ends_period,
    finite_local,
    replace_center,
)
from optperm.distributed.pairs import check_can_be_paired, in_pairs
from optperm.distributed.plans import Every
from optperm.placement import Placement, placing_states

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree


class AgnState(NamedTuple):
    """State of `agn`, one on each replica.

    Attributes:
      count: Steps taken.
      since_commit: Steps since the last commit.
      commits: Commits made.
      local_state: State of the optimizer of the local params.
      center_state: State of the optimizer of the center.
      center: The params as of the last commit, the same on every replica but for `commit="pairs"`.
      accumulator: The sum of the raw local gradients since the last commit, in float32 or wider.
      pulled: Whether the last step ended in a commit, which put the params on the center.
      skipped: Commits without this replica's contribution, because that was not finite, or because
        all contributions together were not.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    since_commit: Int32[Array, ""]
    commits: Int32[Array, ""]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "?*shape"], "Params"]
    accumulator: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, ""]
    skipped: Int32[Array, ""]

    def placements(self) -> list[Placement]:
        """Where the local optimizer places params, and over it the center after a pull."""
        local = placing_states(self.local_state)
        within = [placement for state in local for placement in state.placements()]
        flags = jax.tree.map(
            lambda leaf: jnp.expand_dims(self.pulled, range(self.pulled.ndim, leaf.ndim)),
            self.center,
        )
        return [*within, (self.center, flags)]

    def replace_targets(self, other: Any) -> AgnState:
        """This state with the center of another, and what its optimizers place.

        Args:
          other: One of the same form.
        """
        return replace_center(self, other)


def agn(
    optimizer: optax.GradientTransformation,
    communication_period: Period = 10,
    *,
    axis_name: AxisName | None = None,
    commit: Commit = "mean",
    center_optimizer: optax.GradientTransformation | None = None,
    shard_axes: AxisName = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Local steps on every replica, and one commit a period of the accumulated, normalized gradient.

    Replica :math:`i` holds its own params :math:`\theta^i`, and all hold the same center :math:`c`. Each
    step, with :math:`u(g; s)` the step of `optimizer` in its state :math:`s`:

    .. math::
      a^i \leftarrow a^i + g^i(\theta^i), \qquad \theta^i \leftarrow \theta^i + u(g^i; s^i)

    and :math:`T` steps after the last one, a commit and a pull:

    .. math::
      n^i = a^i / T, \qquad c \leftarrow c + u(n; s_c), \qquad
      \theta^i \leftarrow c, \qquad a^i \leftarrow 0

    with :math:`n` the mean of the :math:`n^i` or their sum, or one center step for each of them in turn.
    Nothing crosses devices on the other :math:`T - 1` steps. Every replica calls `update` with the
    gradient of its own batch: do not average gradients over the axis. Within `jax.shard_map` that takes
    params that vary over the axis (`jax.lax.pcast(params, axis_name, to='varying')` where they do not).

    `update(..., commit=False)` makes the local step alone, and `commit=True` the commit after it,
    whatever the period says: a Python bool that is known while the step is traced, so the first compiles
    to no more than the optimizer and one accumulate, or a traced one that is the same on all replicas.
    `commit=None` counts the steps on the device. Either way a commit stands within a conditional of the
    compiled program, also where `jax.vmap` maps the replicas. :math:`T` is always the number of steps
    that were made. Within `optax.MultiSteps` the flags of micro-steps that only accumulate are not seen.

    `update(..., weight=w)` weighs a replica: the mean is :math:`\sum w_i n_i / \sum w_i`, and in the sum
    or in turn each :math:`n_i` is multiplied by its :math:`w_i`. A weight that is negative or not finite
    is an error where Python sees it, and elsewhere the replica sits out.

    `optimizer` is kept twice, with a state for the local params, which lives on across pulls, and one
    for the center. Schedules of both count local steps, so a rate decays for both; bias correction
    counts what its moments have seen. Both get the extra arguments. For a step of the center `value_fn`,
    `grad_fn` and `per_example_grad_fn` speak for the batches of all replicas, `value` is that of the
    center and `grad` the committed gradient.

    Entries of a gradient that are not finite count as zero in the local step, and a replica that had one
    sits out the commit: it contributes nothing, is pulled like the others, and counts it (`skipped` in
    its state). With no replica left, or where contributions overflow together, the center stays. An
    optimizer that divides by the size of its gradient may make NaN of zeros and keep it: within
    `optax.apply_if_finite` it skips such steps, and goes on. All replicas must count the same steps:
    what may skip one belongs around `optimizer`, not around `agn`.

    Args:
      optimizer: Any optimizer. It makes both the local steps and those of the center.
      communication_period: :math:`T \ge 1`, the local steps from one commit to the next; a schedule is
        one of the number of commits made.
      axis_name: The axis of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas are
        spread, or several. None for a single replica.
      commit: `"mean"`, the mean of the replicas' contributions; `"sum"`, with which the step grows with
        the number of replicas; `"sequential"`, a whole center step for each replica in the order of
        their indices, as if they had arrived at a parameter server one after another (for plain SGD the
        same as `"sum"`); or `"pairs"`, gossip: a step by the mean contribution of two replicas from the
        mean of their centers, each replica with another partner in each commit and a center of its
        own. The first two are one all-reduce of float32 (float64 where a parameter is); the third is an
        all-gather, or an all-reduce of rows where a replica is sharded; the last permutes centers
        and contributions.
      center_optimizer: An optimizer for the center instead, whose schedules count commits.
      shard_axes: The mapped axes over which the params of one replica are sharded, in `jax.shard_map`
        with `check_vma=False`. Elsewhere the types of arrays name them.

    Returns:
      A transformation whose state is a `AgnState`. Its `update` needs `params`, the local ones.
      Apply the updates with `optperm.apply_updates`: then after a commit the params of all replicas are
      `optperm.center_params(opt_state)` bit for bit.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, `axis_name` is not bound where `update` is called,
        gradients arrive there already summed over it, or the trees passed to `update` do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.agn(optax.sgd(0.1), communication_period=2, axis_name="replica")
      >>> params = jnp.zeros((4, 3))  # four replicas
      >>> opt_state = jax.vmap(tx.init)(params)
      >>> @jax.jit
      ... def step(params, opt_state, targets):
      ...     def on_replica(p, s, target):
      ...         updates, s = tx.update(p - target, s, p)  # the gradient of |p - target|^2 / 2
      ...         return optperm.apply_updates(p, updates, s), s
      ...     return jax.vmap(on_replica, axis_name="replica")(params, opt_state, targets)
      >>> targets = jnp.arange(12.0).reshape(4, 3)
      >>> for _ in range(2):
      ...     params, opt_state = step(params, opt_state, targets)
      >>> [round(x, 4) for x in params[0].tolist()]  # 0.095 of the targets' mean
      [0.4275, 0.5225, 0.6175]
      >>> bool((params == params[:1]).all() & (params == optperm.center_params(opt_state)).all())
      True

    References:
      Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_, 2017
    """
    checks.check_transformation("optimizer", optimizer)
    if isinstance(communication_period, Every):
        raise TypeError(
            "communication_period must be an integer or a schedule: plans are diloco's."
        )
    check_period("communication_period", communication_period)
    replicas = Replicas.of(axis_name, shard_axes)
    checks.check_choice("commit", commit, get_args(Commit))
    if center_optimizer is not None:
        checks.check_transformation("center_optimizer", center_optimizer)
    inner = optax.with_extra_args_support(optimizer)
    outer = optax.with_extra_args_support(center_optimizer or optimizer)
    is_paired = commit == "pairs"
    if is_paired:
        check_can_be_paired(axis_name)
    rule = RULES.get(commit)

    def init(params: optax.Params) -> AgnState:
        local_state, center_state = inner.init(params), outer.init(params)
        check_can_be_pulled(local_state, center_state, "agn")
        if is_paired and placing_states(center_state):
            raise ValueError(
                'The optimizer places params where its state says, and commit="pairs" of agn takes the '
                "mean of two centers, where it has placed none."
            )
        return AgnState(
            count=jnp.zeros([], jnp.int32),
            since_commit=jnp.zeros([], jnp.int32),
            commits=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            accumulator=jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params),
            pulled=jnp.zeros([], jnp.bool_),
            skipped=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: optax.Updates,
        state: AgnState,
        params: optax.Params,
        *,
        commit: bool | jax.Array | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AgnState]:
        replicas.check_are_local(grads, params, "agn")
        check_weight(weight)
        is_commit = ends_period(commit, state, communication_period, axis_name, "agn")
        steps = optax.safe_increment(state.since_commit)

        # theta <- theta + u(g; s)
        g, extras = finite_local(grads, extra_args, state.local_state)
        local_state = after_pull(state.local_state, state.center_state, state.pulled, axis_name)
        u, local_state = inner.update(g, local_state, params, **extras)
        u, local_state = cast_like(u, params), cast_like(local_state, state.local_state)

        # a <- a + g
        add = functools.partial(jax.tree.map, lambda a, g: a + g.astype(a.dtype))

        # n = a / T, c <- c + u(n; s_c)
        kept = (state.center, state.center_state), jnp.array(True)

        def make_commit() -> tuple[Center, jax.Array]:
            n = jax.tree.map(lambda a: a / steps.astype(a.dtype), add(state.accumulator, grads))
            step = center_step(outer, extra_args, params, None if is_paired else axis_name)
            combine = rule or functools.partial(in_pairs, count=state.count)
            (c, s_c), took_part = combine(kept[0], n, step, replicas, weight)
            if center_optimizer is None:
                s_c = advance_schedules(s_c, state.center_state, steps)
            return (c, s_c), took_part

        (center, center_state), took_part = cond(is_commit, make_commit, lambda: kept)
        accumulator = state.accumulator
        if not isinstance(is_commit, bool):
            # Tied to what comes of the commit, the old sum is overwritten after that has read it.
            accumulator = jax.lax.optimization_barrier((accumulator, took_part))[0]

        # theta <- c, a <- 0
        updates = jax.tree.map(lambda c, u, p: jnp.where(is_commit, c - p, u), center, u, params)
        return updates, AgnState(
            count=optax.safe_increment(state.count),
            since_commit=jnp.where(is_commit, 0, steps),
            commits=jnp.where(is_commit, optax.safe_increment(state.commits), state.commits),
            local_state=local_state,
            center_state=center_state,
            center=center,
            accumulator=jax.tree.map(lambda a: jnp.where(is_commit, 0, a), add(accumulator, grads)),
            pulled=jnp.asarray(is_commit),
            skipped=jnp.where(took_part, state.skipped, optax.safe_increment(state.skipped)),
        )

    return transformation(
        init, update, method="agn", like=lambda state: state.center, axis_name=axis_name
    )
