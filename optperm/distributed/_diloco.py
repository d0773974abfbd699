"""DiLoCo: many local steps of an inner optimizer, then an outer step along the mean displacement.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", arXiv
2311.08105, 2023; for fragments that may arrive some steps later, "Streaming DiLoCo with overlapping
communication: Towards a Distributed Free Lunch", arXiv 2501.18512, 2025.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.fingerprints import UNSET, fill_fingerprint
from optperm.core.mapped_axes import AxisName
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.transformation import transformation
from optperm.distributed._compression import Compression
from optperm.distributed._every import Every, Exchange, Period
from optperm.distributed._exchange import CombineOrPairs, Take, subtract_params
from optperm.distributed._fragments import FragmentOf, read_flags
from optperm.distributed._local_update import LocalUpdate, count_bad_steps, replace_center
from optperm.distributed._replicas import Replicas
from optperm.exact import Exact, exact_entries


class DilocoState(NamedTuple):
    """State of `diloco` on each replica.

    Attributes:
      count: Number of steps taken.
      since_commit: Number of steps since the last step that exchanged all params.
      commits: Number of steps that exchanged all params, or the version of the center that
        `optperm.distributed.pull` has set.
      local_state: State of the inner optimizer.
      center_state: For each fragment, the state of the outer optimizer.
      center: The common params of all replicas.
      in_flight: The combined contributions that were sent last. This is empty without a delay.
      weights: For each fragment, the sum of the weights of these contributions, or -1 if nothing is in
        flight. This is empty without a delay.
      residual: The part of the contributions that compression has not sent yet. This is empty without
        compression.
      pulled: Whether the last step moved each leaf, or each slice of a leaf, to the center.
      skipped: Number of exchanges without this replica's contribution, because its params or the sum of
        all contributions were not finite.
      zeroed: Number of local steps in which the gradient of this replica had entries that were not
        finite, and that counted as zero.
      fingerprint: The arguments `fragment_of` and `compress` with which the state was made, and whether
        `combine` was `"pairs"`.
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
    zeroed: Int32[Array, ""]
    fingerprint: UInt32[Array, "3"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "fragment_of", "compress", "combine"

    def exact(self) -> list[Exact]:
        """Return the exact entries of the local optimizer and, overriding its targets, the center."""
        where = read_flags(self.pulled, self.center, self.count.ndim)
        return [*exact_entries(self.local_state), Exact(self.center, where, is_target=True)]

    def steps_since_commit(self) -> jax.Array:
        """Return the number of steps since the last step that exchanged all params."""
        return self.since_commit

    def replace_targets(self, other: Any) -> DilocoState:
        """Return this state after a commit, with the center and optimizers' targets of another state.

        Args:
          other: A state with the same structure.
        """
        new: DilocoState = replace_center(self, other)
        return new


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    *,
    every: Period | Every,
    axis_name: AxisName | None = None,
    combine: CombineOrPairs = "mean",
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

    By default, the outer optimizer is SGD with learning rate 1 and no momentum, which averages the
    replicas. A pull does not change inner states.

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
      outer: The optimizer of the center. None for `optax.sgd(1.0)`, with which the center is the mean of
        the replicas. The paper uses `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      every: :math:`H \ge 1`, the number of local steps from one outer step to the next, a schedule of
        the number of commits so far, or an `optperm.distributed.Every`.
      axis_name: The axis or axes of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas
        are spread. None for a single replica.
      combine: `"mean"`; `"sum"` for the sum of the :math:`c - \theta^i`; `"sequential"` for an outer
        step with each of them, in the order of the replicas; or `"pairs"` for gossip.
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
      See `optperm.agn` for local gradients, `commit=` and `weight=` of `update`, and extra arguments.
      With a plan, `commit=plan.at(step)` selects the fragments of a step during tracing. True and
      `"only"` exchange all fragments at once, without a delay. They replace fragments in flight, whose
      steps the displacement contains.

      With `combine="pairs"`, `optperm.distributed.center_params` returns the replica's own center, and
      `value_fn` and similar arguments use its own batch. An outer momentum without `nesterov` must be
      below the learning rate; otherwise the centers may never converge. Converged centers still differ
      by about one rounding error of their dtype.

      In `benchmarks/distributed.py`, the paper's optimizer can be worse than one replica alone. MuLoCo
      is `optperm.diloco(optax.contrib.muon(...), every=...)`, with which Nesterov momentum can be
      better.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, or `combine="sequential"` has a delay; if, in `update`,
        `axis_name` is not bound, gradients are already summed over this axis, trees do not match, or the
        state was made (seen only where it is not traced) with other fragments, `fragment_of`, `compress`
        or `center_dtype`, or with pairs and without; or if `inner` stores params that a pull would not
        move (`optax.contrib.schedule_free` and the others listed for `optperm.agn`).

    References:
      Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023

      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025

      Kolehmainen et al., `NoLoCo: No-all-reduce Low Communication Training Method for Large Models
      <https://arxiv.org/abs/2506.10911>`_, 2025
    """
    # c <- c - Delta, the mean of the replicas
    outer = optax.sgd(1.0) if outer is None else outer
    checks.check_choice("combine", combine, get_args(CombineOrPairs))
    replicas = Replicas(axis_name or None, shard_axes or ())
    options = LocalUpdate(
        method="diloco",
        inner=checks.as_optimizer("inner", inner),
        outer=checks.as_optimizer("outer", outer),
        every=every,
        replicas=replicas,
        combine=combine,
        mixing=mixing,
        compress=compress,
        center_dtype=center_dtype,
        fragment_of=fragment_of,
        has_sums=False,
    )

    def init(params: Params) -> DilocoState:
        state = DilocoState(**options.init(params), zeroed=jnp.zeros([], jnp.int32))
        return fill_fingerprint(state, options.list_arguments(params))

    def update(
        grads: Updates,
        state: DilocoState,
        params: Params,
        *,
        commit: bool | Literal["only"] | jax.Array | Exchange | None = None,
        weight: float | jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Updates, DilocoState]:
        now = options.begin(grads, state, params, commit, weight, extra_args)

        # Delta_p = c_p - theta_p, after theta <- theta + u(g; s)
        def contribute(p: int, take: Take) -> list[jax.Array]:
            del p
            delta: list[jax.Array] = subtract_params(take(state.center), take(now.find_theta()))
            return delta

        # c_p <- c_p + u_outer(Delta_p; s_p), with the Delta_p of all replicas
        exchanged, outcomes = now.exchange(contribute)

        # theta_p <- alpha theta_p + (1 - alpha) c_p
        updates, new_state = now.pull(exchanged, outcomes)
        zeroed = state.zeroed + count_bad_steps(now.grads, state.local_state, replicas)
        return now.finish(updates, new_state._replace(zeroed=zeroed))

    return transformation(
        init,
        update,
        method="diloco",
        like=lambda state: state.center,
        dtypes=center_dtype is None,
        axis_name=replicas.axis_name,
    )
