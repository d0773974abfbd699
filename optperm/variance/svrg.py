"""SVRG: gradients with less variance, by a snapshot of the params and the full gradient there.

R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance Reduction",
NeurIPS 2013.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite
from optperm.contract.mapped_axes import cond, mark_varying, varying_axes
from optperm.contract.schedules import resolve_schedule
from optperm.contract.states import find_state, mask_like, replace_state, without_variables

GradFn = Callable[[optax.Params], optax.Updates]


class Snapshot(NamedTuple):
    r"""A point at which the full gradient is known.

    Attributes:
      is_taken: Whether there is one yet.
      params: :math:`\tilde\theta`; the initial params before the first one is taken.
      full_grad: :math:`\mu`, the full gradient there; zero before.
    """

    is_taken: jax.Array  # bool ()
    params: optax.Params  # like params, leaf for leaf
    full_grad: optax.Updates  # shaped like params; float32, or the parameter's dtype if wider


class SvrgState(NamedTuple):
    """State of `svrg`.

    Attributes:
      count: Steps taken.
      key: Data of the threefry key from which the coins of the loopless form are drawn.
      snapshot: The snapshot that the next step uses.
    """

    count: jax.Array  # type: ignore[assignment]  # int32 ()
    key: jax.Array  # uint32 (2,)
    snapshot: Snapshot


def svrg(
    coefficient: optax.ScalarOrSchedule = 1.0,
    *,
    refresh_every: int | jax.Array | None = None,
    refresh_probability: optax.ScalarOrSchedule | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Corrects the gradient of a batch by what the batch gets wrong at a snapshot of the params.

    .. math::
      g_t = \nabla f_{B_t}(\theta_t) - c_t (\nabla f_{B_t}(\tilde\theta) - \mu), \qquad
      \mu = \nabla f(\tilde\theta)

    with :math:`\tilde\theta` the params at the snapshot and :math:`\mu` the full gradient there. The
    correction is zero in the mean over batches, so the gradient stays unbiased; its variance goes to
    zero as :math:`\theta_t` and :math:`\tilde\theta` approach an optimum, so a constant learning rate
    converges all the way. Before the first snapshot gradients pass through. It corrects gradients and
    nothing else; any optimizer follows it: `optax.chain(optperm.svrg(), optax.sgd(0.025))`.

    There are three ways to take snapshots:

    - between steps, every few epochs, by `optperm.full_gradient` and `optperm.take_snapshot`;
    - `refresh_every` m: inside the compiled step, at the start of steps 0, m, 2m, ...;
    - `refresh_probability` p: loopless SVRG, :math:`\tilde\theta_{t+1} = \theta_t` with probability p,
      else :math:`\tilde\theta_t`, and :math:`\tilde\theta_0 = \theta_0`. All replicas draw the same.

    In SVRG :math:`c_t` is 1. On large deep networks that mostly *hurts*: a snapshot soon says little of
    the gradient, and the correction adds more variance than it takes. :math:`\alpha`-SVRG weakens it
    by a coefficient that falls linearly over the training, from 0.75 to 0 for instance; a step at which
    it is 0 costs hardly more than without SVRG.

    Both gradients of a step are on the same batch, its random key included, so that they see the same
    dropout mask: draw what is random from a key in the batch.

    It belongs in front of what accumulates or divides gradients. Inside `optax.MultiSteps` only the last
    of the accumulated gradients would be corrected: chain it with
    `optax.MultiSteps(optimizer, k).gradient_transformation()` instead. Inside `optax.partition` or
    `optax.masked` it sees its own part of the params, and the closures of `optperm.evaluate` take the
    others as they are now: that is exact only as long as those do not change.

    An entry whose correction is not finite passes through uncorrected, and a snapshot that is not
    finite, or whose full gradient is not, is not taken.

    Args:
      coefficient: :math:`c_t \ge 0`, a number or a schedule of the step.
      refresh_every: m, in steps.
      refresh_probability: p, in [0, 1], a number or a schedule of the step.
      seed: Seed of the coins.

    Returns:
      A transformation whose state is a `SvrgState`. Its `update` needs `params` and the extra argument
      `grad_fn(params)`, the gradient on the batch at other params, as `optperm.evaluate` makes it; to
      take snapshots inside the step also `full_grad_fn(params)`, the gradient over all examples.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, both ways to refresh are given, an extra argument
        that is needed is missing, or the trees passed to `update` do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (512, 3))
      >>> y = x @ jnp.array([1.0, 2.0, 3.0]) + jax.random.normal(jax.random.key(1), (512,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2)
      >>> batches = [(x[i : i + 16], y[i : i + 16]) for i in range(0, 512, 16)]
      >>> tx = optax.chain(optperm.svrg(), optax.sgd(0.05))
      >>> @jax.jit
      ... def step(w, opt_state, batch):
      ...     e = optperm.evaluate(loss_fn, w, batch)
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     return optax.apply_updates(w, updates), opt_state
      >>> w = jnp.zeros(3)
      >>> opt_state = tx.init(w)
      >>> for epoch in range(8):
      ...     full_grad = optperm.full_gradient(loss_fn, w, batches)
      ...     opt_state = optperm.take_snapshot(opt_state, w, full_grad)
      ...     for batch in batches:
      ...         w, opt_state = step(w, opt_state, batch)
      >>> bool(jnp.linalg.norm(jax.grad(loss_fn)(w, (x, y))) < 1e-5)  # the optimum, in spite of noise
      True

    References:
      Johnson and Zhang, `Accelerating Stochastic Gradient Descent using Predictive Variance Reduction
      <https://papers.nips.cc/paper/4937>`_, NeurIPS 2013

      Kovalev, Horvath and Richtarik, `Don't Jump Through Hoops and Remove Those Loops: SVRG and Katyusha
      are Better Without the Outer Loop <https://arxiv.org/abs/1901.08689>`_, ALT 2020

      Yin et al., `A Coefficient Makes SVRG Effective <https://arxiv.org/abs/2311.05589>`_, ICLR 2025
    """
    checks.check_in_range("coefficient", coefficient, 0.0, float("inf"))
    if refresh_every is not None:
        checks.check_count("refresh_every", refresh_every)
    if refresh_probability is not None:
        checks.check_in_range("refresh_probability", refresh_probability, 0.0, 1.0)
        if refresh_every is not None:
            raise ValueError("Pass refresh_every or refresh_probability, not both.")
    checks.check_seed("seed", seed)

    def init_fn(params: optax.Params) -> SvrgState:
        checks.check_real_floating(
            "params", params, advice="Mask the others to another optimizer with optax.partition."
        )

        def zero_full_grad(leaf: Any) -> jax.Array:
            zeros = jnp.zeros_like(leaf, accumulation_dtype(leaf))
            return mark_varying(zeros, varying_axes(leaf))

        return SvrgState(
            count=jnp.zeros([], jnp.int32),
            key=jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
            snapshot=Snapshot(
                is_taken=mark_varying(jnp.zeros([], bool), varying_axes(params)),
                params=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
                full_grad=jax.tree.map(zero_full_grad, params),
            ),
        )

    def refresh(
        state: SvrgState, params: optax.Params, full_grad_fn: GradFn | None
    ) -> tuple[Snapshot, Snapshot]:
        """The snapshots for this step and for the next."""
        old = state.snapshot
        if refresh_every is None and refresh_probability is None:
            return old, old
        if full_grad_fn is None:
            raise ValueError(
                "svrg with refresh_every or refresh_probability needs the extra argument full_grad_fn, "
                "the gradient over all examples at given params: call update(..., full_grad_fn=lambda "
                "params: optperm.evaluate(loss_fn, params, all_examples).grad)."
            )
        if refresh_every is not None:
            is_due = state.count % jnp.asarray(refresh_every, jnp.int32) == 0
        else:
            key = jax.random.wrap_key_data(state.key, impl="threefry2x32")
            probability = resolve_schedule("refresh_probability", refresh_probability, state.count)
            coin = jax.random.bernoulli(jax.random.fold_in(key, state.count), probability)
            is_due = coin | ~old.is_taken
        new = cond(
            is_due,
            lambda: _installed(old, params, full_grad_fn(params))[0],
            lambda: old,
        )
        if refresh_every is not None:
            return new, new
        # Loopless: the old snapshot serves this step, unless there is none yet.
        now = jax.tree.map(
            lambda old, first: jnp.where(state.snapshot.is_taken, old, first), old, new
        )
        return now, new

    def update_fn(
        updates: optax.Updates,
        state: SvrgState,
        params: optax.Params | None = None,
        *,
        grad_fn: GradFn | None = None,
        full_grad_fn: GradFn | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SvrgState]:
        del extra_args
        params = checks.require_params(params, "svrg")
        checks.check_same_tree(
            "params", params, state.snapshot.params, source="the optimizer state"
        )
        checks.check_same_tree(
            "updates", updates, state.snapshot.params, source="the optimizer state", dtypes=False
        )
        if grad_fn is None:
            raise ValueError(
                "svrg needs the extra argument grad_fn, the gradient on this batch at given params: e = "
                "optperm.evaluate(loss_fn, params, batch), then update(e.grad, state, params, "
                "**e.extra_args)."
            )
        now, following = refresh(state, params, full_grad_fn)

        c = resolve_schedule("coefficient", coefficient, state.count, float)
        is_used = now.is_taken & (c != 0.0)

        def at_snapshot() -> optax.Updates:
            grads = mask_like(grad_fn(now.params), now.params)
            checks.check_same_tree(
                "grad_fn(params)", grads, now.params, source="params", dtypes=False
            )
            return jax.tree.map(lambda g, mu: jnp.asarray(g, mu.dtype), grads, now.full_grad)

        def correct(g: Any, g_snapshot: jax.Array, mu: jax.Array, leaf: Any) -> jax.Array:
            wide = accumulation_dtype((mu, g))
            g, g_snapshot, mu, factor = (jnp.asarray(x, wide) for x in (g, g_snapshot, mu, c))
            # In this order what is large and nearly equal cancels first, without a rounding error.
            corrected = ((g - factor * g_snapshot) + factor * mu).astype(jnp.result_type(leaf))
            is_sound = is_used & jnp.isfinite(corrected)
            return jnp.where(is_sound, corrected, g.astype(corrected.dtype))

        # Only this gradient is behind the condition: the rest is one pass over the params, which XLA
        # joins with what follows.
        snapshot_grads = cond(
            is_used,
            at_snapshot,
            lambda: optax.tree.zeros_like(now.full_grad),
        )
        new_updates = jax.tree.map(correct, updates, snapshot_grads, now.full_grad, params)
        return new_updates, SvrgState(optax.safe_increment(state.count), state.key, following)

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def take_snapshot(opt_state: Any, params: optax.Params, full_grad: optax.Updates) -> Any:
    r"""The optimizer state with a new snapshot for `svrg`.

    .. math::
      \tilde\theta \leftarrow \theta, \qquad \mu \leftarrow \nabla f(\theta)

    Args:
      opt_state: The state of an optimizer with `optperm.svrg` anywhere in it: chained, masked,
        partitioned, injected into, or kept as variables by `flax.nnx.Optimizer`. It is left alone.
      params: The current params, all of them where svrg is masked. They are copied.
      full_grad: The full gradient at these params, from `optperm.full_gradient`.

    Returns:
      The whole optimizer state, of the same structure, shapes and dtypes. If the params or the full
      gradient are not finite, the snapshot stays as it was, with a warning where Python can see it.

    Raises:
      ValueError: If there is no state of svrg, or more than one, or the trees do not match it.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> tx = optax.chain(optperm.svrg(), optax.adam(0.1))
      >>> opt_state = tx.init(params)
      >>> opt_state = optperm.take_snapshot(opt_state, params, {"w": jnp.array([0.5, 0.0])})
      >>> opt_state[0].snapshot.full_grad["w"].tolist()
      [0.5, 0.0]
    """
    state = find_state(opt_state, SvrgState, method="svrg")
    snapshot, is_finite = _installed(
        state.snapshot, without_variables(params), without_variables(full_grad)
    )
    if not isinstance(is_finite, jax.core.Tracer) and not is_finite:
        warnings.warn(
            "The snapshot was not taken: the params or their full gradient are not finite.",
            RuntimeWarning,
            stacklevel=2,
        )
    new = state._replace(snapshot=snapshot)
    return replace_state(opt_state, SvrgState, new, method="svrg")


def _installed(
    old: Snapshot, params: optax.Params, full_grad: optax.Updates
) -> tuple[Snapshot, jax.Array]:
    """A new snapshot, or the old one if the new one is not finite; and whether it is."""
    params, full_grad = mask_like(params, old.params), mask_like(full_grad, old.params)
    checks.check_same_tree("params", params, old.params, source="the optimizer state")
    checks.check_same_tree(
        "full_grad", full_grad, old.params, source="the optimizer state", dtypes=False
    )
    is_finite = all_finite((params, full_grad))

    def choose(new: Any, old: jax.Array) -> jax.Array:
        return jnp.where(is_finite, jnp.asarray(new, old.dtype), old)

    new = Snapshot(
        is_taken=old.is_taken | is_finite,
        params=jax.tree.map(choose, params, old.params),
        full_grad=jax.tree.map(choose, full_grad, old.full_grad),
    )
    return new, is_finite
