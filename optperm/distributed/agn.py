"""AGN: local steps, and one commit a period of the accumulated, normalized gradient.

J. Hermans, G. Spanakis and R. Moeckel, "Accumulated Gradient Normalization", ACML 2017,
arXiv 1710.02368.
"""

import dataclasses
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import AxisName
from optperm.distributed.commits import Commit, Replicas
from optperm.distributed.local_steps import Period, check_period, local_steps
from optperm.distributed.plans import Every


@dataclasses.dataclass(frozen=True)
class _AccumulatedGradient:
    """n = a / T: the mean of the raw gradients along the local steps, each taken before its step."""

    reads_local_params: bool = False

    def init(self, params: optax.Params) -> optax.Updates:
        return jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params)

    def accumulate(
        self, accumulator: optax.Updates, grads: optax.Updates, restart: jax.Array
    ) -> optax.Updates:
        def add(a: jax.Array, g: jax.Array) -> jax.Array:
            g = g.astype(a.dtype)
            return jnp.where(restart, g, a + g)

        return jax.tree.map(add, accumulator, grads)

    def total(
        self,
        accumulator: optax.Updates,
        steps: jax.Array,
        center: optax.Params,
        moved: Callable[[], optax.Params],
    ) -> optax.Updates:
        del center, moved
        return jax.tree.map(lambda a: a / steps.astype(a.dtype), accumulator)


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
    to no more than the optimizer and one accumulate. `commit=None` counts the steps on the device.
    :math:`T` is always the number of steps that were made. Within `optax.MultiSteps` the flags of
    micro-steps that only accumulate are not seen.

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
        the number of replicas; or `"sequential"`, a whole center step for each replica in the order of
        their indices, as if they had arrived at a parameter server one after another (for plain SGD the
        same as `"sum"`). The first two are one all-reduce of float32 (float64 where a parameter is); the
        last is an all-gather, or an all-reduce of rows where a replica's params are cut.
      center_optimizer: An optimizer for the center instead, whose schedules count commits.
      shard_axes: The mapped axes over which the params of one replica are cut, in `jax.shard_map` with
        `check_vma=False`. Elsewhere they are told from the types.

    Returns:
      A transformation whose state is a `LocalStepsState`. Its `update` needs `params`, the local ones.
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
    return local_steps(
        optimizer,
        optimizer if center_optimizer is None else center_optimizer,
        communication_period,
        _AccumulatedGradient(),
        replicas=replicas,
        commit=commit,
        counts_local_steps=center_optimizer is None,
        method="agn",
    )
