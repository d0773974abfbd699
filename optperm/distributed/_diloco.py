"""DiLoCo: many local steps of an inner optimizer, then an outer step along the mean displacement.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105, 2023; for fragments that may arrive some steps later, "Streaming DiLoCo with overlapping
communication: Towards a Distributed Free Lunch", arXiv 2501.18512, 2025.
"""

from __future__ import annotations

import functools
import operator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype, compute_in_order
from optperm.core.fingerprints import (
    UNSET,
    check_fingerprint,
    describe_difference,
    fill_fingerprint,
)
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import shard_like
from optperm.core.transformation import transformation
from optperm.core.trees import unstack
from optperm.distributed._compression import Compression
from optperm.distributed._exchanges import NOTHING, AtOnce, Delayed, Step
from optperm.distributed._exchanging import show
from optperm.distributed._fragments import FragmentOf, Fragments
from optperm.distributed._local_steps import (
    Period,
    check_can_be_pulled,
    check_period,
    count_bad_steps,
    ends_period,
    finish,
    is_commit_only,
    keep_exact,
    make_center_step,
    make_local_step,
    replace_center,
)
from optperm.distributed._pairs import check_can_be_paired
from optperm.distributed._plans import Due, Every, Exchange, resolve_due
from optperm.distributed._replicas import Replicas, check_weight
from optperm.exact import Exact, apply_updates, exact_entries, placing_states


class DilocoState(NamedTuple):
    """State of `diloco` on each replica.

    Attributes:
      count: Number of steps taken.
      since_commit: Number of steps since the last step that exchanged all params.
      commits: Number of steps that exchanged all params.
      local_state: State of the inner optimizer.
      center_state: For each fragment, the state of the outer optimizer.
      center: The common params of all replicas.
      in_flight: The mean of the last contributions. This is empty without a delay.
      weights: For each fragment, the sum of the weights of the last contributions, or -1 if nothing is
        in flight.
      residual: The part of the contributions that compression has not sent yet. This is empty without
        compression.
      pulled: Whether the last step moved each leaf, or each slice of a leaf, to the center.
      skipped: Number of exchanges without this replica's contribution, because its params or the sum of
        all contributions were not finite.
      zeroed: Number of local steps in which the gradient of this replica had entries that were not
        finite, and that counted as zero.
      fingerprint: The arguments `fragment_of`, `compress` and `combine` with which the state was made.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    since_commit: Int32[Array, ""]
    commits: Int32[Array, ""]
    local_state: Any
    center_state: Any
    center: PyTree[Float[Array, "..."]]
    in_flight: PyTree[Float[Array, "..."]]
    weights: Float[Array, " fragments"]
    residual: PyTree[Float[Array, "..."]]
    pulled: Bool[Array, "leaves slices"]
    skipped: Int32[Array, ""]
    zeroed: Int32[Array, ""]
    fingerprint: UInt32[Array, "3"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "fragment_of", "compress", "combine"

    def exact(self) -> list[Exact]:
        """Return the exact entries of the local optimizer and, overriding its targets, the center."""
        stack, longest = self.count.ndim, self.pulled.shape[-1]
        leaves, structure = jax.tree.flatten(self.center)

        def flag(row: jax.Array, leaf: jax.Array) -> jax.Array:
            # All entries in the row of a whole leaf are equal.
            length = leaf.shape[stack] if leaf.ndim > stack and leaf.shape[stack] <= longest else 1
            length = 1 if longest == 1 else length
            shape = leaf.shape[:stack] + (length,) * (leaf.ndim > stack)
            row = row[..., :length].reshape(*shape, *(1,) * (leaf.ndim - len(shape)))
            return row if length == 1 else shard_like(jnp.broadcast_to(row, leaf.shape), leaf)

        flags = list(map(flag, unstack(self.pulled, -2), leaves))
        where = jax.tree.unflatten(structure, flags)
        return [*exact_entries(self.local_state), Exact(self.center, where, is_target=True)]

    def steps_since_commit(self) -> jax.Array:
        """Return the number of steps since the last step that exchanged all params."""
        return self.since_commit

    def replace_targets(self, other: Any) -> DilocoState:
        """Return this state after a commit, with the center and optimizers' targets of another state.

        Args:
          other: A state with the same structure.
        """
        # Contributions in flight and residuals belong to the previous center.
        return replace_center(self, other)._replace(
            weights=jnp.full_like(self.weights, NOTHING),
            residual=optax.tree.zeros_like(self.residual),
        )


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    every: Period | Every,
    axis_name: AxisName | None = None,
    combine: Literal["mean", "pairs"] = "mean",
    mixing: float | jax.Array = 0.0,
    compress: Compression | None = None,
    center_dtype: Any = None,
    fragment_of: FragmentOf | None = None,
    shard_axes: AxisName = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Take many local steps on every replica, then one outer step along their mean displacement.

    Replica :math:`i` trains its params :math:`\theta^i` with the inner optimizer. After every :math:`H`
    steps, the outer optimizer gets the mean displacement from the center :math:`c` *as a gradient*, and
    every replica is pulled to the new center:

    .. math::
      \Delta = \frac{1}{k} \sum_{i=1}^{k} (c - \theta^i), \qquad
      c \leftarrow c + u_{\text{outer}}(\Delta), \qquad \theta^i \leftarrow c

    An outer SGD with learning rate 1 and no momentum averages the replicas. A pull does not change inner
    states.

    With a plan, `every=optperm.distributed.Every(period, fragments, delay)`, replicas exchange one
    fragment of the params at a time. A fragment arrives `delay` steps after being sent (Streaming
    DiLoCo):

    .. math::
      c_p \leftarrow c_p + u_{\text{outer}}(\Delta_p), \qquad
      \theta^i_p \leftarrow \alpha \theta^i_p + (1 - \alpha) c_p

    With `combine="pairs"`, no replica waits for all others (NoLoCo). Each replica has its own center
    :math:`c^i`. At an exchange, the step number determines a random partner :math:`j`. The displacement
    uses the params of both partners, which also brings their centers closer together:

    .. math::
      \Delta^i = \tfrac{1}{2} \sum_{l \in \{i, j\}} (c^i - \theta^l)

    Args:
      inner: The optimizer of the local steps, AdamW in the paper.
      outer: The optimizer of the center. None for `optax.sgd(0.8, momentum=0.5, nesterov=True)`, which
        works well with both few and many commits. The paper uses
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      every: :math:`H \ge 1`, the number of local steps from one outer step to the next, a schedule of
        the number of commits so far, or an `optperm.distributed.Every`.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas
        are spread. None for a single replica.
      combine: `"mean"`, or `"pairs"` for gossip.
      mixing: :math:`\alpha` in [0, 1], the weight of a replica's own params in a pull.
      compress: An `optperm.distributed.Compression`, which sends fewer bytes, with error feedback. None
        sends the whole displacement in float32.
      center_dtype: The dtype of :math:`c` and of the outer state, such as `"float32"` for bfloat16
        params. None for the dtypes of the params.
      fragment_of: The fragment of each leaf in a plan, as a function `(path, leaf)` or a tree like
        params. Its values are integers below `fragments`, or sequences with an integer for each slice of
        the leaf's leading axis, such as the layers of a `jax.lax.scan`. None to divide whole leaves, in
        order, into `fragments` parts of about equal size.
      shard_axes: The mapped axes over which the params of one replica are sharded. Only `jax.shard_map`
        with `check_vma=False` needs this argument; otherwise the types of arrays name the axes.

    Returns:
      A transformation whose state is a `DilocoState`. Its `update` needs the local `params`.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0, momentum=0.9), every=2)
      >>> params = jnp.array(1.0)
      >>> opt_state = tx.init(params)
      >>> for _ in range(4):  # on a slope of 1: -0.2 after two steps, then -0.2 and 0.9 of the last -0.2
      ...     updates, opt_state = tx.update(jnp.array(1.0), opt_state, params)
      ...     params = optperm.apply_updates(params, updates, opt_state)
      ...     print(round(float(params), 4))
      0.9
      0.8
      0.7
      0.42

    Notes:
      See `optperm.agn` for local gradients, `commit=` and `weight=` of `update`, extra
      arguments, replicas that start apart or take fewer steps, random numbers of `inner`, wrappers
      (around `inner`, not around `diloco`), zeros and fixed entries of the center, and exact params with
      `optperm.apply_updates`. Nonfinite entries of a gradient count as zero, and `zeroed` in the state
      counts the steps with such entries. An exchange excludes only replicas whose params are not finite.
      The pull resets such params to the center, for any `mixing`, but only with
      `optperm.apply_updates`, because NaN plus an update is NaN.

      With a plan, `commit=plan.at(step)` selects the fragments of a step during tracing. True and
      `"only"` exchange all fragments at once, without a delay, and replace fragments in flight. With
      more than one fragment, the outer optimizer gets no extra arguments, because a loss is a function
      of all params.

      With `combine="pairs"`, `optperm.distributed.center_params` returns the replica's own center, and
      `value_fn` and similar arguments use its own batch. An outer momentum without `nesterov` must be
      below the learning rate; otherwise the centers may never converge. Converged centers still differ
      by about one rounding error of their dtype.

      `benchmarks/distributed.py` compares outer optimizers with one replica alone at equal time, with 10
      and 100 commits. There, the default and averaging with `optax.sgd(1.0)` are never worse than one
      replica; the paper's optimizer can be worse. MuLoCo is
      `optperm.diloco(optax.contrib.muon(...), every=...)`, for which the same outer optimizers work
      well.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if, in `update`, `axis_name` is not bound, gradients
        are already summed over this axis, trees do not match, or the state was made with other
        fragments, `fragment_of`, `compress`, `combine` or `center_dtype`; or if `inner` stores params
        that a pull would not move (`optax.contrib.schedule_free` and the others listed for
        `optperm.agn`).

    References:
      Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023

      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025

      Kolehmainen et al., `NoLoCo: No-all-reduce Low Communication Training Method for Large Models
      <https://arxiv.org/abs/2506.10911>`_, 2025
    """
    # benchmarks/distributed.py compares this outer optimizer with the paper's and with averaging.
    outer = optax.sgd(0.8, momentum=0.5, nesterov=True) if outer is None else outer
    replicas = Replicas(axis_name or None, shard_axes or ())
    is_paired, axis_name = combine == "pairs", replicas.axis_name
    _check_options(combine, axis_name, mixing, compress, center_dtype)
    if not isinstance(every, Every):
        check_period("every", every)
    plan = every if isinstance(every, Every) else Every(1)
    local_optimizer = checks.as_optimizer("inner", inner)
    center_optimizer = checks.as_optimizer("outer", outer)
    # The extra arguments of a center's step are averaged over these replicas.
    extras_axis = None if is_paired else axis_name
    is_mixed = not (isinstance(mixing, int | float) and mixing == 0)
    exchanger = (Delayed if plan.delay else AtOnce)(replicas, compress, is_paired)
    is_one = plan.fragments == 1
    is_plain = is_one and not (plan.delay or is_mixed or compress or center_dtype)

    def init(params: Params) -> DilocoState:
        fragments = Fragments(params, plan.fragments, fragment_of)
        local_state = local_optimizer.init(params)
        if placing_states(local_state) and not is_plain:
            # A pull of some params, or to other values, would contradict the optimizer's targets.
            raise ValueError(
                "The inner optimizer sets exact params (as sgperm does). diloco allows this only with "
                "one fragment, and without delay, mixing, compress or center_dtype."
            )
        center = optax.tree.cast(replicas.make_center(params), center_dtype)
        parts = [fragments.take_rows(center, p) for p in range(plan.fragments)]
        center_state = tuple(map(center_optimizer.init, parts))
        check_can_be_pulled(local_state, center_state, "diloco")
        wide = jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p)), params)
        state = DilocoState(
            count=jnp.zeros([], jnp.int32),
            since_commit=jnp.zeros([], jnp.int32),
            commits=jnp.zeros([], jnp.int32),
            local_state=local_state,
            center_state=center_state,
            center=center,
            in_flight=wide if plan.delay else (),
            weights=jnp.full([plan.fragments], NOTHING, accumulation_dtype(params)),
            residual=jax.tree.map(jnp.copy, wide) if compress is not None else (),
            pulled=fragments.tabulate_flags([False] * plan.fragments),
            skipped=jnp.zeros([], jnp.int32),
            zeroed=jnp.zeros([], jnp.int32),
        )
        return fill_fingerprint(state, _list_arguments(fragments, compress, combine))

    def update(
        grads: Updates,
        state: DilocoState,
        params: Params,
        *,
        commit: bool | Literal["only"] | jax.Array | Exchange | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, DilocoState]:
        has_step = not is_commit_only(commit)
        grads = grads if has_step else None
        replicas.check_are_local(grads, params, "diloco")
        check_weight(weight)
        _check_same_plan(state, plan, compress, center_dtype)
        fragments = Fragments(params, plan.fragments, fragment_of)
        check_fingerprint("diloco", state, _list_arguments(fragments, compress, combine))
        due = _find_due(commit, state, every, axis_name)

        # theta <- theta + u(g; s)
        step = make_local_step(local_optimizer, grads, state, params, extra_args, axis_name)
        # Within a conditional, an exchange computes the local step again, because as inputs of the
        # conditional, the moves would be stored and copied in every step.
        is_traced = any(isinstance(flag, jax.Array) for pair in due for flag in pair)
        known = None if is_traced else step(state.local_state)

        def find_theta() -> Params:
            return apply_updates(params, *(known or step(state.local_state)))

        # For each fragment p that is due, `Exchanger.send` computes the mean n_p of Delta_p = c_p -
        # theta_p over the replicas, and `Exchanger.receive` computes c_p <- c_p + u(n_p; s_c)
        now = Step(
            fragments=fragments,
            # Each conditional computes theta, but all of them share one trace.
            find_theta=jax.jit(find_theta) if is_traced else find_theta,
            move_center=make_center_step(
                center_optimizer, extra_args if is_one else {}, params, extras_axis
            ),
            weight=weight,
            count=state.count,
        )
        exchanged, outcomes = exchanger.exchange(now, state, due)
        # The step overwrites the local state, so it waits until the exchange has read this state.
        moves, local_state = known or step(
            compute_in_order(exchanged.weights, state.local_state)[1]
        )
        arrived = [outcome.has_arrived for outcome in outcomes]
        is_bad = [outcome.is_bad for outcome in outcomes]
        center = keep_exact(
            exchanged.center,
            state.center,
            local_state,
            is_due=functools.reduce(operator.or_, arrived),
            axis_name=extras_axis,
        )

        # theta_p <- alpha theta_p + (1 - alpha) c_p, for each fragment p that has arrived
        updates = jax.tree.map(
            functools.partial(_pull, mixing if is_mixed else None),
            fragments.spread_flags(arrived, params),
            fragments.spread_flags(is_bad, params),
            center,
            moves,
            params,
        )
        # With mixing, only nonfinite params, which were replaced, are equal to the center.
        pulled = [a & b for a, b in zip(arrived, is_bad, strict=True)] if is_mixed else arrived
        # This is true if the step sends and receives all fragments
        is_whole = functools.reduce(operator.and_, [flag for pair in due for flag in pair])
        new_state = DilocoState(
            count=optax.safe_increment(state.count) if has_step else state.count,
            since_commit=jnp.where(is_whole, 0, optax.safe_increment(state.since_commit)),
            commits=jnp.where(is_whole, optax.safe_increment(state.commits), state.commits),
            local_state=local_state,
            center_state=exchanged.center_state,
            center=center,
            in_flight=exchanged.in_flight,
            weights=exchanged.weights,
            residual=exchanged.residual,
            pulled=fragments.tabulate_flags(pulled),
            skipped=state.skipped + sum(each.has_missed.astype(jnp.int32) for each in outcomes),
            zeroed=state.zeroed + count_bad_steps(grads, state.local_state, replicas),
            fingerprint=state.fingerprint,
        )
        return finish(updates, new_state, state, has_step, axis_name)

    tx = transformation(
        init,
        update,
        method="diloco",
        like=lambda state: state.center,
        dtypes=center_dtype is None,
        axis_name=axis_name,
    )
    return show("diloco", tx, replicas, every)


def _find_due(
    commit: object, state: DilocoState, every: Period | Every, axis_name: AxisName | None
) -> list[Due]:
    """Return two flags per fragment: whether this step sends and whether it receives the fragment."""
    if isinstance(every, Every):
        return resolve_due(commit, every, state.count, axis_name)
    is_commit = ends_period(commit, state, every, axis_name, "diloco")
    return [(is_commit, is_commit)]


def _pull(
    mixing: Any,
    has_arrived: bool | jax.Array,
    is_bad: jax.Array,
    c: jax.Array,
    move: jax.Array,
    p: jax.Array,
) -> jax.Array:
    """Return a leaf's update, to alpha theta + (1 - alpha) c for fragments that have arrived."""
    if has_arrived is False:
        return move
    if mixing is not None:
        # The center replaces local params that are not finite.
        c = jnp.where(is_bad, c, mixing * (p + move) + (1 - mixing) * c)
    return jnp.where(has_arrived, c.astype(p.dtype) - p, move)


def _check_options(
    combine: str, axis_name: AxisName | None, mixing: Any, compress: object, center_dtype: Any
) -> None:
    checks.check_choice("combine", combine, ("mean", "pairs"))
    checks.check_in_range("mixing", mixing, 0.0, 1.0, may_be_schedule=False)
    if not isinstance(compress, Compression | None):
        wanted = "an optperm.distributed.Compression or None"
        raise TypeError(f"compress must be {wanted}, got {compress!r}.")
    if combine == "pairs":
        check_can_be_paired(axis_name)
    if combine == "pairs" and compress is not None:
        raise ValueError('compress needs combine="mean", a sum over all replicas.')
    if center_dtype is not None and not jnp.issubdtype(center_dtype, jnp.floating):
        raise TypeError(f"center_dtype must be a real floating dtype, got {center_dtype!r}.")


def _list_arguments(
    fragments: Fragments, compress: Compression | None, combine: str
) -> dict[str, Any]:
    """Return the arguments that shape a state; the decay of a residual may change."""
    form = None if compress is None else (compress.fraction, compress.bits)
    return {"fragment_of": fragments.of, "compress": form, "combine": combine}


def _check_same_plan(
    state: DilocoState, plan: Every, compress: Compression | None, center_dtype: Any
) -> None:
    """Raise if the arrays of a state, traced or not, show that it was made with other arguments."""
    center, residual = map(jax.tree.leaves, (state.center, state.residual))
    has_delay = bool(jax.tree.leaves(state.in_flight)) or not center
    if len(state.center_state) != plan.fragments or has_delay < bool(plan.delay):
        fragments = len(state.center_state)
        delay = "a delay" if jax.tree.leaves(state.in_flight) else "no delay"
        wanted = f"a plan with fragments={plan.fragments} and delay={plan.delay}"
        raise ValueError(
            f"The state belongs to a plan with fragments={fragments} and {delay}, not to {wanted}: pass "
            "the plan of the state as every, or make a new state with init."
        )
    if center and bool(residual) != (compress is not None):
        raise ValueError(describe_difference("diloco", "compress"))
    if center_dtype is not None and any(leaf.dtype != center_dtype for leaf in center):
        raise ValueError(describe_difference("diloco", "center_dtype"))
