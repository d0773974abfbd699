"""DiLoCo: many local steps of one optimizer, and rare steps of another on how far they went.

A. Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
arXiv 2311.08105, 2023.
"""

from collections.abc import Callable

import jax
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.mapped_axes import AxisName
from optperm.distributed.commits import Replicas
from optperm.distributed.local_steps import Period, check_period, local_steps


class _Drift:
    """Delta = center - theta: how far the replica went, pointing back, as a gradient does."""

    reads_local_params = True

    def init(self, params: optax.Params) -> tuple[()]:
        del params
        return ()

    def accumulate(
        self, accumulator: tuple[()], grads: optax.Updates, restart: jax.Array
    ) -> tuple[()]:
        del grads, restart
        return accumulator

    def total(
        self,
        accumulator: tuple[()],
        steps: jax.Array,
        center: optax.Params,
        moved: Callable[[], optax.Params],
    ) -> optax.Updates:
        del accumulator, steps

        def drift(c: jax.Array, p: jax.Array) -> jax.Array:
            dtype = accumulation_dtype(c)
            return c.astype(dtype) - p.astype(dtype)

        return jax.tree.map(drift, center, moved())


def diloco(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation | None = None,
    sync_every: Period = 500,
    *,
    axis_name: AxisName | None = None,
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
    Everything else is as in `optperm.agn`: local gradients, extra arguments, replicas that are not
    finite, wrappers around `inner` rather than around `diloco`, exact params by `optperm.apply_updates`.

    Args:
      inner: The optimizer of the local steps; AdamW in the paper.
      outer: The optimizer of the synchronized params. None for the paper's,
        `optax.sgd(0.7, momentum=0.9, nesterov=True)`.
      sync_every: :math:`H \ge 1`, in steps.
      axis_name: The axis of `jax.pmap`, `jax.shard_map` or `jax.vmap` over which the replicas are
        spread, or several. None for a single replica.

    Returns:
      A transformation whose state is a `LocalStepsState`. Its `update` needs `params`, the local ones.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, `axis_name` is not bound where `update` is called, or
        the trees passed to `update` do not match.

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
    """
    outer = optax.sgd(0.7, momentum=0.9, nesterov=True) if outer is None else outer
    checks.check_transformation("inner", inner)
    checks.check_transformation("outer", outer)
    check_period("sync_every", sync_every)
    checks.check_axis_name("axis_name", axis_name)
    return local_steps(
        inner,
        outer,
        sync_every,
        _Drift(),
        replicas=Replicas(axis_name, shard_axes),
        commit="mean",
        counts_local_steps=False,
        method="diloco",
    )
