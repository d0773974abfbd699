"""DiLoCo: many local steps of one optimizer, and rare steps of another on how far they went.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105, 2023.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.mapped_axes import AxisName
from optperm.distributed.commits import Replicas
from optperm.distributed.compression import Compression
from optperm.distributed.fragments import FragmentOf
from optperm.distributed.local_steps import Period, check_period
from optperm.distributed.pairs import check_can_be_paired
from optperm.distributed.plans import Every
from optperm.distributed.streaming import streaming_steps


def _dtype(value: Any) -> Any:
    try:
        return jnp.dtype(value)
    except TypeError as error:
        raise TypeError(f"center_dtype must be a real floating dtype, got {value!r}.") from error


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    sync_every: Period | Every = 500,
    *,
    axis_name: AxisName | None = None,
    commit: Literal["mean", "pairs"] = "mean",
    mixing: float | jax.Array = 0.0,
    compress: Compression | None = None,
    center_dtype: Any = None,
    fragment_of: FragmentOf | None = None,
    shard_axes: AxisName = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Many local steps on every replica, then one outer step on their mean displacement.

    Replica :math:`i` moves its own params :math:`\theta^i` by the inner optimizer. After every :math:`H`
    steps the displacement from the params :math:`c` of the last synchronization is fed to the outer
    optimizer *as a gradient*, and every replica starts again from where that arrives:

    .. math::
      \Delta = \frac{1}{k} \sum_{i=1}^{k} (c - \theta^i), \qquad
      c \leftarrow c + u_{\text{outer}}(\Delta), \qquad \theta^i \leftarrow c

    so an outer SGD with learning rate 1 and no momentum averages the replicas. Inner states are kept.
    Everything else is as in `optperm.agn`: local gradients, `commit=`, `weight=`, extra arguments,
    wrappers around `inner` rather than around `diloco`, exact params by `optperm.apply_updates`. Only a
    replica whose params are not finite sits out a commit: entries of a gradient that are not count as
    zero.

    A pull puts params that are not finite back on the center whatever `mixing` is, and only by
    `optperm.apply_updates`: NaN and an update give NaN.

    With a plan, `sync_every=optperm.Every(period, fragments, delay)`, the params are exchanged in
    fragments, one after another, and what was sent arrives `delay` steps later (streaming DiLoCo):

    .. math::
      c_p \leftarrow c_p + u_{\text{outer}}(\Delta_p), \qquad
      \theta^i_p \leftarrow \alpha \theta^i_p + (1 - \alpha) c_p

    `commit=plan.at(step)` says while tracing what a step exchanges; True exchanges all fragments at
    once, without a delay, and takes the place of what was on its way. With more than one fragment the
    outer optimizer gets no extra arguments: a loss is one of all params.

    With `commit="pairs"` no replica waits for all (NoLoCo). Each has a center :math:`c^i` of its own,
    and at an exchange its displacement is that from the params of two, itself and a partner :math:`j`
    that the number of the step draws:

    .. math::
      \Delta^i = \tfrac{1}{2} \sum_{l \in \{i, j\}} (c^i - \theta^l)

    so the outer step brings the centers of the two together as well. `optperm.center_params` is then
    each replica's own, and `value_fn` and the like speak for its own batch. An outer momentum without
    `nesterov` has to be below the learning rate: beyond it the centers may part for good.

    The outer momentum of the paper needs many commits, and the faster the replicas move the less of it
    is good: with forty commits `optax.sgd(0.8, momentum=0.5, nesterov=True)` did best on a small
    transformer (`examples/byte_transformer.py`), with twenty averaging by `optax.sgd(1.0)`. MuLoCo is
    `diloco(optax.contrib.muon(...))`, for which the same outer optimizers are good.

    Args:
      inner: The optimizer of the local steps; AdamW in the paper.
      outer: The optimizer of the synchronized params. None for the paper's,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      sync_every: :math:`H \ge 1`, the local steps from one outer step to the next; a schedule of the
        number of commits made; or an `optperm.Every`.
      axis_name: The axis of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas are
        spread, or several. None for a single replica.
      commit: `"mean"`, or `"pairs"` for gossip: see above.
      mixing: :math:`\alpha` in [0, 1], how much of its own params a replica keeps where others arrive.
      compress: What of a displacement is sent, `optperm.compress_top_k(...)` or
        `optperm.compress_quantized(...)`, with error feedback. None sends all of it in float32.
      center_dtype: The dtype of :math:`c` and of the outer state, such as `"float32"` for bfloat16
        params. None for that of the params.
      fragment_of: To which fragment of a plan a leaf belongs: a function `(path, leaf)`, or a tree like
        params, of integers below `fragments`; or of a sequence of them, one for each slice of the leaf's
        leading axis, as of layers that `jax.lax.scan` runs over. None for `fragments` runs of whole
        leaves of about equal size.
      shard_axes: The mapped axes over which the params of one replica are cut, in `jax.shard_map` with
        `check_vma=False`. Elsewhere they are told from the types.

    Returns:
      A transformation whose state is a `DilocoState`. Its `update` needs `params`, the local ones.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, `axis_name` is not bound where `update` is called,
        gradients arrive there already summed over it, or the trees passed to `update` do not match.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> tx = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0, momentum=0.9), sync_every=2)
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

    References:
      Douillard et al., `DiLoCo: Distributed Low-Communication Training of Language Models
      <https://arxiv.org/abs/2311.08105>`_, 2023

      Douillard et al., `Streaming DiLoCo with overlapping communication
      <https://arxiv.org/abs/2501.18512>`_, 2025

      Kolehmainen et al., `NoLoCo: No-all-reduce Low Communication Training Method for Large Models
      <https://arxiv.org/abs/2506.10911>`_, 2025
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    checks.check_transformation("inner", inner)
    checks.check_transformation("outer", outer)
    replicas = Replicas.of(axis_name, shard_axes)
    checks.check_choice("commit", commit, ("mean", "pairs"))
    if commit == "pairs":
        check_can_be_paired(axis_name)
        if compress is not None:
            raise ValueError(
                'compress is of a sum over all replicas, which commit="pairs" has not.'
            )
    checks.check_in_range("mixing", mixing, 0.0, 1.0, may_be_schedule=False)
    if compress is not None and not isinstance(compress, Compression):
        raise TypeError(
            "compress must be what optperm.compress_quantized or optperm.compress_top_k returns, got "
            f"{compress!r}."
        )
    if center_dtype is not None and not jnp.issubdtype(_dtype(center_dtype), jnp.floating):
        raise TypeError(f"center_dtype must be a real floating dtype, got {center_dtype!r}.")
    if not isinstance(sync_every, Every):
        check_period("sync_every", sync_every)
    if fragment_of is not None and getattr(sync_every, "fragments", 1) == 1:
        raise ValueError(
            "fragment_of needs a plan of several: sync_every=optperm.Every(period, n)."
        )
    return streaming_steps(
        inner,
        outer,
        sync_every,
        mixing=mixing,
        compress=compress,
        center_dtype=center_dtype,
        fragment_of=fragment_of,
        replicas=replicas,
        in_pairs=commit == "pairs",
    )
