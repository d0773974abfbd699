"""AGN: local steps, and one commit of the accumulated, normalized gradient per period.

J. Hermans, G. Spanakis and R. Moeckel, "Accumulated Gradient Normalization", ACML 2017,
arXiv 1710.02368.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.control import both, cond
from optperm.core.dtypes import accumulation_dtype, compute_in_order
from optperm.core.fingerprints import UNSET
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.transformation import transformation
from optperm.distributed._exchanging import show
from optperm.distributed._local_counts import (
    advance_schedules,
    check_schedules,
    count_local_steps,
)
from optperm.distributed._local_steps import (
    Period,
    check_can_be_pulled,
    check_chooses_no_zeros,
    check_period,
    ends_period,
    finish,
    is_commit_only,
    keep_exact,
    make_center_step,
    make_local_step,
    replace_center,
)
from optperm.distributed._replicas import (
    Center,
    CenterStep,
    Replicas,
    check_weight,
    divide,
    gather_trees,
    scale,
    weigh,
)
from optperm.exact import Exact, exact_entries

Combine = Literal["mean", "sum", "sequential"]


class AgnState(NamedTuple):
    """State of `agn` on each replica.

    Attributes:
      count: Number of steps taken.
      since_commit: Number of steps since the last commit.
      commits: Number of commits.
      local_state: State of the inner optimizer.
      center_state: State of the center's optimizer.
      center: The params at the last commit, the same on every replica.
      accumulator: The sum of the raw local gradients since the last commit, in float32 or wider.
      pulled: Whether the last step ended in a commit, which moved the params to the center.
      skipped: Number of commits without this replica's contribution, because the contribution or the sum
        of all contributions was not finite.
      fingerprint: Whether `outer` is None, which determines what the counts in `center_state` mean.
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
    fingerprint: UInt32[Array, "1"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return ("outer",)

    def exact(self) -> list[Exact]:
        """Return the exact entries of the local optimizer and, overriding its targets, the center."""
        where = jax.tree.map(lambda _: self.pulled, self.center)
        return [*exact_entries(self.local_state), Exact(self.center, where, is_target=True)]

    def steps_since_commit(self) -> jax.Array:
        """Return the number of local steps that the center does not include yet."""
        return self.since_commit

    def replace_targets(self, other: Any) -> AgnState:
        """Return this state after a commit, with the center and optimizers' targets of another state.

        Args:
          other: A state with the same structure.
        """
        # The accumulated gradients belong to the previous center.
        accumulator = optax.tree.zeros_like(self.accumulator)
        return replace_center(self, other)._replace(accumulator=accumulator)


def agn(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    every: Period = 10,
    *,
    axis_name: AxisName | None = None,
    combine: Combine = "mean",
    shard_axes: AxisName = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Take local steps on every replica, and commit the normalized gradient sum once per period.

    Replica :math:`i` holds its params :math:`\theta^i`, and all replicas hold the same center :math:`c`.
    Let :math:`u(g; s)` be the step of `inner` in its state :math:`s`. A local step is

    .. math::
      a^i \leftarrow a^i + g^i(\theta^i), \qquad \theta^i \leftarrow \theta^i + u(g^i; s^i)

    After :math:`T` steps, a commit and a pull follow. The center uses the step of `outer`, if given:

    .. math::
      n^i = a^i / T, \qquad c \leftarrow c + u(n; s_c), \qquad
      \theta^i \leftarrow c, \qquad a^i \leftarrow 0

    where :math:`n` is the mean or the sum of the :math:`n^i`. With `combine="sequential"`, the center
    takes one step for each :math:`n^i` instead.

    Args:
      inner: The optimizer of the local steps.
      outer: The optimizer of the center, whose schedules count commits. None for `inner` with a separate
        state, whose schedules count local steps.
      every: :math:`T \ge 1`, the number of local steps from one commit to the next, or a schedule of the
        number of commits so far. If the schedule returns NaN, each step commits.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas
        are spread. None for a single replica.
      combine: `"mean"` for the mean of the contributions :math:`n^i`, `"sum"` for their sum, which
        grows with the number of replicas, or `"sequential"`. With `"sequential"`, the center
        takes a step for each replica in the order of the indices, as if the replicas reached a parameter
        server in turn. With plain SGD, `"sequential"` equals `"sum"`.
      shard_axes: The mapped axes over which the params of one replica are sharded. Only `jax.shard_map`
        with `check_vma=False` needs this argument; otherwise the types of arrays name the axes.

    Returns:
      A transformation whose state is an `AgnState`. Its `update` needs the local `params`, and the
      gradient of the replica's own batch. Do not average this gradient over the axis. `update` also
      takes

      - `commit=`: False takes only the local step, and True also commits after the step. A Python bool
        is known while tracing, so a local step compiles to the optimizer and one addition. A traced bool
        must be the same on all replicas. With None, the last step of each period commits. `"only"`
        commits the steps since the last commit without a local step: it ignores the gradient, and
        changes nothing if there was no step since the last commit.
      - `weight=`: The weight :math:`w_i \ge 0` of this replica. The mean is
        :math:`\sum w_i n^i / \sum w_i`. For `"sum"` and `"sequential"`, each :math:`n^i` is multiplied
        by :math:`w_i`.

      Apply the updates with `optperm.apply_updates`. After a commit, the params of all replicas then
      equal `optperm.distributed.center_params(opt_state)` bit for bit.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.agn(optax.sgd(0.1), every=2, axis_name="replica")
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
      >>> center = optperm.distributed.center_params(opt_state)
      >>> bool((params == params[:1]).all() & (params == center).all())
      True

    Notes:
      Start all replicas with the same params. If `init` is called where the axis is mapped, as in
      `optperm.switch_after`, and the params differ, the center is their mean.

      If `inner` fixes an entry or keeps it at zero on all replicas, the center does the same.

      Local steps send nothing. A commit with `"mean"` or `"sum"` needs one all-reduce in float32 (in
      float64 if a param is float64). `"sequential"` needs an all-gather, or an all-reduce of rows if a
      replica is sharded. The collective is in a conditional of the compiled program, even if `jax.vmap`
      maps the replicas.

      :math:`T` in the equations is the number of steps actually taken, also with `commit=`.
      `optax.MultiSteps` drops the results of micro-steps that only accumulate, but not their
      collectives: each micro-step of a period's last step exchanges contributions. In this case, pass
      `commit=`, True only in the last micro-step of a period. Within `jax.shard_map`, params must vary
      over the axis; if they do not, use `jax.lax.pcast(params, axis_name, to='varying')`. If `axis_name`
      combines axes of `jax.shard_map` and of a `jax.vmap` within it, pass `check_vma=False` to
      `jax.shard_map`.

      Without `outer`, `inner` has two states: a local state, which pulls do not change, and a state for
      the center. In both states, schedules count local steps: a commit after the local step with count
      t evaluates schedules at t. Bias correction, and periods such as `every` of `optperm.low_rank`,
      count the gradients that a state has seen. The center's optimizer also gets the extra arguments.
      In a step of the center, `value_fn`, `grad_fn` and `per_example_grad_fn` use the batches of all
      replicas, `value` is the value at the center, and `grad` is the committed gradient.

      Nonfinite entries of a gradient count as zero in the local step. The commit leaves out a replica
      with such entries, still pulls the replica to the center, and counts the omission in `skipped`. The
      same is true for a traced weight that is negative or nonfinite. If no replica remains, or the sum
      of contributions overflows, the center does not move. An optimizer that divides by the norm of its
      gradient may produce NaNs from zeros; put `optax.apply_if_finite` around it to skip these steps.

      Without `commit=`, all replicas must call `update` equally often, so put such a wrapper around
      `inner`, not around `agn`. With `commit=` in each call, replicas on different devices may take
      different numbers of local steps, if all replicas commit at the same calls. Pass the number of
      steps as `weight=` for the mean over all steps, and pass `outer`, because without it, schedules of
      the center count the local steps of each replica.

      If `inner` draws random numbers (`optax.add_noise`), its state contains their key, and replicas
      with the same key draw the same numbers. To give each replica its own numbers, call `init` where
      the axis is mapped, of an `inner` whose key is folded with `jax.lax.axis_index(axis_name)`.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if, in `update`, `axis_name` is not bound, gradients
        are already summed over this axis, or trees do not match; or if the local optimizer stores params
        that a pull would not move (`optax.contrib.schedule_free`, `mechanize`, `madgrad`, `cocob`,
        `katyusha`); or, without `outer`, if a state of `inner` may use one count for its moments and for
        a schedule (`optax.contrib.prodigy`, `dadapt_adamw`, `momo`, or an unknown state), or if `inner`
        chooses which params are zero (`optperm.rigl`).

    References:
      Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_, 2017
    """
    check_period("every", every)
    checks.check_choice("combine", combine, get_args(Combine))
    replicas = Replicas(axis_name or None, shard_axes or ())
    local_optimizer = checks.as_optimizer("inner", inner)
    center_optimizer = local_optimizer if outer is None else checks.as_optimizer("outer", outer)
    # Without `outer`, the center's schedules count local steps, otherwise commits.
    is_same = outer is None

    def init(params: Params) -> AgnState:
        center = replicas.make_center(params)
        local_state, center_state = local_optimizer.init(params), center_optimizer.init(center)
        check_can_be_pulled(local_state, center_state, "agn")
        check_chooses_no_zeros(center_state)
        if is_same:
            check_schedules(center_state, params)
        return AgnState(
            count=jnp.zeros([], jnp.int32),
            since_commit=jnp.zeros([], jnp.int32),
            commits=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=center,
            accumulator=jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params),
            pulled=jnp.zeros([], jnp.bool_),
            skipped=jnp.zeros([], jnp.int32),
        )

    def update(
        grads: Updates,
        state: AgnState,
        params: Params,
        *,
        commit: bool | Literal["only"] | jax.Array | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, AgnState]:
        has_step = not is_commit_only(commit)
        grads = grads if has_step else None
        replicas.check_are_local(grads, params, "agn")
        check_weight(weight)
        is_commit = ends_period(commit, state, every, axis_name, "agn")
        # `finish` undoes an update without steps.
        steps = jnp.maximum(optax.safe_increment(state.since_commit) - int(not has_step), 1)

        # theta <- theta + u(g; s)
        local_step = make_local_step(local_optimizer, grads, state, params, extra_args, axis_name)
        u, local_state = local_step(state.local_state)

        # a <- a + g uses the raw gradient, so that a commit notices nonfinite entries
        def add(a: Updates) -> Updates:
            return jax.tree.map(lambda a, g: a + g.astype(a.dtype), a, grads) if has_step else a

        # n = a / T, c <- c + u(n; s_c). The commit computes a + g itself, because as an input of the
        # conditional, the sum would be stored once more in every step.
        old = (state.center, state.center_state), jnp.array(True)

        def make_commit() -> tuple[Center, jax.Array]:
            n = jax.tree.map(lambda a: a / steps.astype(a.dtype), add(state.accumulator))
            optimizer = center_optimizer
            if is_same:
                optimizer = count_local_steps(optimizer, state, steps, has_step)
            step = make_center_step(optimizer, extra_args, params, axis_name)
            if combine == "sequential":
                (c, s_c), took_part = _step_in_turn(old[0], n, step, replicas, weight)
            else:
                is_mean = combine == "mean"
                (c, s_c), took_part = _step_by_sum(old[0], n, step, replicas, weight, is_mean)
            c = keep_exact(c, state.center, local_state, True, axis_name)
            # Schedules advance even if no contribution was finite.
            if is_same:
                s_c = advance_schedules(s_c, state.center_state, steps, c)
            return (c, s_c), took_part

        (center, center_state), took_part = cond(is_commit, make_commit, lambda: old)
        accumulator = state.accumulator
        if not isinstance(is_commit, bool):
            # The commit must read the old sum before the addition overwrites it.
            _, accumulator = compute_in_order(took_part, accumulator)

        # theta <- c, a <- 0
        updates = jax.tree.map(lambda c, u, p: jnp.where(is_commit, c - p, u), center, u, params)
        new_state = AgnState(
            count=optax.safe_increment(state.count) if has_step else state.count,
            since_commit=jnp.where(is_commit, 0, steps),
            commits=jnp.where(is_commit, optax.safe_increment(state.commits), state.commits),
            local_state=local_state,
            center_state=center_state,
            center=center,
            accumulator=jax.tree.map(lambda a: jnp.where(is_commit, 0, a), add(accumulator)),
            pulled=jnp.asarray(is_commit),
            skipped=jnp.where(took_part, state.skipped, optax.safe_increment(state.skipped)),
            fingerprint=state.fingerprint,
        )
        return finish(updates, new_state, state, has_step, axis_name)

    tx = transformation(
        init,
        update,
        method="agn",
        like=lambda state: state.center,
        dtypes=True,
        axis_name=axis_name,
        # Without `outer`, schedules of the center's optimizer count local steps, otherwise commits.
        shape_arguments=lambda _: {"outer": is_same},
    )
    return show("agn", tx, replicas, every)


def _step_by_sum(
    at: Center, n: Updates, step: CenterStep, replicas: Replicas, weight: Any, is_mean: bool
) -> tuple[Center, jax.Array]:
    """Take one step with sum w n, or sum w n / sum w, from one all-reduce.

    Return the center, and whether this replica took part.
    """
    # If n is not finite, or overflows in the dtype of the center, the replica has weight 0.
    _, is_finite = replicas.cast_gradient(n, at[0])
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    total, weights = replicas.sum((scale(n, w), w))
    # The sum of finite numbers may overflow.
    n = divide(total, weights) if is_mean else total
    gradient, is_valid = replicas.cast_gradient(n, at[0])
    has_any = weights > 0
    return step(at, gradient, is_valid & has_any), takes_part & (is_valid | ~has_any)


def _step_in_turn(
    at: Center, n: Updates, step: CenterStep, replicas: Replicas, weight: Any
) -> tuple[Center, jax.Array]:
    """Take a step with w n of each replica in turn, after one all-gather.

    Return the center, and whether this replica took part.
    """
    _, is_finite = replicas.cast_gradient(n, at[0])
    w, takes_part = weigh(weight, is_finite, accumulation_dtype(n))
    given = optax.tree.cast_like(scale(n, w), at[0]), w

    def take_turn(at: Center, row: tuple[Updates, jax.Array]) -> tuple[Center, None]:
        # Weights are finite, but without the sort in `both`, XLA takes minutes to compile the loop.
        return step(at, row[0], both(row[1] > 0, jnp.isfinite(row[1]))), None

    if replicas.axis_name is None:
        return take_turn(at, given)[0], takes_part
    # All replicas take the same steps in the same order, so the centers stay equal without another
    # collective.
    rows = gather_trees(given, replicas.axis_name)
    return jax.lax.scan(take_turn, at, rows)[0], takes_part
