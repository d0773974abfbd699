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
from optperm.core.dtypes import accumulation_dtype
from optperm.core.fingerprints import UNSET, fill_fingerprint
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.transformation import transformation
from optperm.distributed._compression import Compression
from optperm.distributed._every import Every, Exchange, Period
from optperm.distributed._exchange import Combine, Take, divide_by_steps
from optperm.distributed._fragments import FragmentOf, read_flags
from optperm.distributed._local_update import LocalUpdate, choose, replace_center
from optperm.distributed._replicas import Replicas
from optperm.exact import Exact, exact_entries


class AgnState(NamedTuple):
    """State of `agn` on each replica.

    Attributes:
      count: Number of steps taken.
      since_commit: Number of steps since the last step that exchanged all params.
      commits: Number of steps that exchanged all params, or the version of the center that
        `optperm.distributed.pull` has set.
      local_state: State of the inner optimizer.
      center_state: For each fragment, the state of the center's optimizer.
      center: The common params of all replicas.
      in_flight: The combined contributions that were sent last. This is empty without a delay.
      weights: For each fragment, the sum of the weights of these contributions, or -1 if nothing is in
        flight. This is empty without a delay.
      residual: The part of the contributions that compression has not sent yet. This is empty without
        compression.
      pulled: Whether the last step moved each leaf, or each slice of a leaf, to the center.
      skipped: Number of exchanges without this replica's contribution, because the contribution or the
        sum of all contributions was not finite.
      accumulator: The sum of the raw local gradients since the leaf was sent, in float32 or wider.
      steps: For each fragment, the number of steps in this sum.
      fingerprint: The arguments `fragment_of` and `compress` with which the state was made.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    since_commit: Int32[Array, ""]
    commits: Int32[Array, ""]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "..."]]
    in_flight: PyTree[Float[Array, "..."]]
    weights: PyTree[Float[Array, " fragments"]]
    residual: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, "leaves slices"]
    skipped: Int32[Array, ""]
    accumulator: PyTree[Float[Array, "..."]]
    steps: Int32[Array, " fragments"]
    fingerprint: UInt32[Array, "2"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "fragment_of", "compress"

    def exact(self) -> list[Exact]:
        """Return the exact entries of the local optimizer and, overriding its targets, the center."""
        where = read_flags(self.pulled, self.center, self.count.ndim)
        return [*exact_entries(self.local_state), Exact(self.center, where, is_target=True)]

    def steps_since_commit(self) -> jax.Array:
        """Return the number of local steps since the last step that exchanged all params."""
        return self.since_commit

    def replace_targets(self, other: Any) -> AgnState:
        """Return this state after a commit, with the center and optimizers' targets of another state.

        Args:
          other: A state with the same structure.
        """
        # The accumulated gradients belong to the previous center.
        accumulator, steps = optax.tree.zeros_like((self.accumulator, self.steps))
        new: AgnState = replace_center(self, other)
        return new._replace(accumulator=accumulator, steps=steps)


def agn(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    every: Period | Every = 10,
    *,
    axis_name: AxisName | None = None,
    combine: Combine = "mean",
    compress: Compression | None = None,
    center_dtype: Any = None,
    fragment_of: FragmentOf | None = None,
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

    With a plan, `every=optperm.distributed.Every(period, fragments, delay)`, each fragment of the params
    has its own :math:`a^i_p` and :math:`T_p`, which restart when the fragment is sent.

    Args:
      inner: The optimizer of the local steps.
      outer: The optimizer of the center, whose schedules count commits. None for `inner` with a separate
        state, if `inner` has no schedule.
      every: :math:`T \ge 1`, the number of local steps from one commit to the next, a schedule of the
        number of commits so far, or an `optperm.distributed.Every`. If the schedule returns NaN, each
        step commits.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas
        are spread. None for a single replica.
      combine: `"mean"` for the mean of the contributions :math:`n^i`, `"sum"` for their sum, which
        grows with the number of replicas, or `"sequential"`, with which the center takes a step for each
        replica in the order of the indices.
      compress: An `optperm.distributed.Compression`, which sends fewer bytes, with error feedback. None
        sends the whole contribution in float32.
      center_dtype: The dtype of :math:`c` and of the center's optimizer, such as `"float32"` for
        bfloat16 params. None for the dtypes of the params.
      fragment_of: The fragment of each leaf in a plan, as in `optperm.diloco`.
      shard_axes: The mapped axes over which the params of one replica are sharded. Only `jax.shard_map`
        with `check_vma=False` needs this argument; otherwise the types of arrays name the axes.

    Returns:
      A transformation whose state is an `AgnState`. Its `update` needs the local `params`, and the
      gradient of the replica's own batch. Do not average this gradient over the axis. `update` also
      takes

      - `commit=`: False takes only the local step, and True also commits after the step. A traced
        bool must be the same on all replicas. With None, the last step of each period commits. `"only"`
        commits the steps since the last commit without a local step: it ignores the gradient, and
        changes nothing if there was no step since the last commit. With a plan, `plan.at(step)` selects
        the fragments of a step during tracing. True and `"only"` exchange all fragments at once, after
        the center has received the fragments in flight.
      - `weight=`: The weight :math:`w_i \ge 0` of this replica. The mean is
        :math:`\sum w_i n^i / \sum w_i`. For `"sum"` and `"sequential"`, each :math:`n^i` is multiplied
        by :math:`w_i`.
      - `replica_axes=`: All mapped axes along which replicas lie, which `optperm.training.fit` passes.
        An axis that `axis_name` lacks is an error, since replicas along this axis would never commit.

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

      A commit with `"mean"` or `"sum"` needs one all-reduce in float32 or float64, and with
      `"sequential"` or `compress` an all-gather. :math:`T` counts the steps actually taken.

      Without `outer`, `inner` has two states: a local state, which pulls do not change, and a state for
      the center. A schedule in `inner` would fall :math:`T` times as slowly there, so it needs `outer`.
      With one fragment, the center's optimizer also gets the extra arguments, of all replicas' batches.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, or `combine="sequential"` has a delay; if, in `update`,
        `axis_name` is not bound, gradients are already summed over this axis, trees do not match, or the
        state was made (seen only where it is not traced) with other fragments, `fragment_of`, `compress`
        or `center_dtype`; if the local optimizer stores params that a pull would not move
        (`optax.contrib.schedule_free`, `mechanize`, `madgrad`, `cocob`); or, without
        `outer`, if `inner` has a schedule, or chooses which params are zero (`optperm.rigl`).

    References:
      Hermans et al., `Accumulated Gradient Normalization <https://arxiv.org/abs/1710.02368>`_, 2017
    """
    checks.check_choice("combine", combine, get_args(Combine))
    replicas = Replicas(axis_name or None, shard_axes or ())
    options = LocalUpdate(
        method="agn",
        inner=checks.as_optimizer("inner", inner),
        outer=checks.as_optimizer("outer", inner if outer is None else outer),
        every=every,
        replicas=replicas,
        combine=combine,
        compress=compress,
        center_dtype=center_dtype,
        fragment_of=fragment_of,
        has_sums=True,
    )

    def init(params: Params) -> AgnState:
        shared = options.init(params)
        if outer is None:
            _check_has_no_schedule(shared["local_state"])
        _check_chooses_no_zeros(shared["center_state"])
        state = AgnState(
            **shared,
            accumulator=jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params),
            steps=jnp.zeros([options.plan.fragments], jnp.int32),
        )
        return fill_fingerprint(state, options.list_arguments(params))

    def update(
        grads: Updates,
        state: AgnState,
        params: Params,
        *,
        commit: bool | Literal["only"] | jax.Array | Exchange | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, AgnState]:
        now = options.begin(grads, state, params, commit, weight, extra_args)
        # a <- a + g uses the raw gradient, so that a commit notices nonfinite entries
        has_step = now.grads is not None
        g = optax.tree.cast_like(now.grads, state.accumulator) if has_step else None
        steps = state.steps + int(has_step)

        # n_p = a_p / T_p. The commit computes a + g itself, because as an input of the conditional, the
        # sum would be stored once more in every step.
        def contribute(p: int, take: Take) -> list[jax.Array]:
            a = (
                optax.tree.add(take(state.accumulator), take(g))
                if has_step
                else take(state.accumulator)
            )
            # `finish` undoes an update without steps.
            n: list[jax.Array] = divide_by_steps(a, steps[p])
            return n

        # c_p <- c_p + u(n_p; s_p), with the n_p of all replicas
        exchanged, outcomes = now.exchange(contribute)

        # theta <- theta + u(g; s), theta_p <- c_p, which `exact` makes equal to c_p bit for bit
        updates, new_state = now.pull(exchanged, outcomes)

        # a_p <- 0, T_p <- 0 if fragment p was sent
        a = now.after(outcomes, state.accumulator)
        a = optax.tree.add(a, g) if has_step else a

        def restart(is_sent: Any, a: jax.Array) -> jax.Array:
            return a if is_sent is False else choose(is_sent, jnp.zeros_like(a), a)

        new_state = new_state._replace(
            accumulator=jax.tree.map(restart, now.fragments.spread_flags(now.sent), a),
            steps=jnp.where(jnp.stack(list(map(jnp.asarray, now.sent))), 0, steps),
        )
        return now.finish(updates, new_state)

    return transformation(
        init,
        update,
        method="agn",
        like=lambda state: state.center,
        dtypes=center_dtype is None,
        axis_name=replicas.axis_name,
    )


def _check_has_no_schedule(state: Any) -> None:
    """Raise if the state of an optimizer shows that it reads a schedule.

    The state of a schedule has only counts. `optax.inject_hyperparams` lists states of its schedules.
    """

    def is_count(node: Any) -> bool:
        dtype = getattr(node, "dtype", None)
        return dtype is not None and not jnp.ndim(node) and jnp.issubdtype(dtype, jnp.integer)

    def has_schedule(node: Any) -> bool:
        if not isinstance(node, tuple):
            return False
        has_only_counts = bool(node) and all(map(is_count, node))
        return has_only_counts or bool(getattr(node, "hyperparams_states", None))

    for node in filter(has_schedule, jax.tree.leaves(state, is_leaf=has_schedule)):
        raise ValueError(
            f"inner has a schedule ({type(node).__name__}), which would count commits at the center: "
            "pass outer=, the optimizer of the center, such as "
            "outer=optax.adam(lambda commits: schedule(commits * every))."
        )


def _check_chooses_no_zeros(center_state: Any) -> None:
    """Raise if the center's optimizer chooses which entries are zero."""
    entries = exact_entries(center_state)
    if any(each.values is not None and not each.is_target for each in entries):
        raise ValueError(
            "The center's optimizer in agn (outer or, without outer, inner) chooses which entries are "
            "zero (rigl, prune_gradually), and would choose other entries than the replicas. Pass "
            "another outer, such as outer=optax.sgd(1.0): the center then has the zeros of inner."
        )
