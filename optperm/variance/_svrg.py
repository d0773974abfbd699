"""SVRG: reduce the variance of gradients with a snapshot of the params and its full gradient.

R. Johnson and T. Zhang, "Accelerating Stochastic Gradient Descent using Predictive Variance Reduction",
NeurIPS 2013.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core import checks
from optperm.core.control import cond
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.core.keys import as_key, key_data
from optperm.core.mapped_axes import varying_zeros
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Bool, Float, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.states import find_state, replace_state
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like, without_variables
from optperm.variance._batch_gradients import BATCH_GRADIENT, GradFn, evaluate_gradient

FULL_GRADIENT = {
    "full_grad_fn": "the gradient over all examples at given params (in fit, optperm.with_loss passes "
    "this function; svrg does not need it with "
    'callbacks={"epoch_start": optperm.variance.take_snapshot} instead of every= and probability=): '
    'full_grad_fn=optperm.evaluate(loss_fn, params, all_examples).extra_args["grad_fn"], with'
}
_IN_FIT = (
    'pass callbacks={"epoch_start": optperm.variance.take_snapshot} to fit for a snapshot before each '
    "epoch, or call optperm.variance.take_snapshot in your own loop"
)
_ADVICE = "call optperm.variance.take_snapshot, or pass every= or probability="


class Snapshot(NamedTuple):
    r"""A point at which the full gradient is known.

    Attributes:
      is_taken: Whether a snapshot has been taken.
      params: :math:`\tilde\theta`; the initial params before the first snapshot.
      full_grad: :math:`\mu`, the full gradient at these params, in float32 or the parameter's dtype if
        wider; zero before the first snapshot.
    """

    is_taken: Bool[Array, ""]
    params: PyTree[Float[Array, "?*shape"], "Params"]
    full_grad: PyTree[Float[Array, "?*shape"], "Params"]


class SvrgState(NamedTuple):
    """State of `svrg`.

    Attributes:
      count: Number of steps taken.
      key: Data of the threefry key for the random draws of `probability`.
      snapshot: The snapshot that the next step uses.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    snapshot: Snapshot

    def warnings(self, params: Any) -> list[str]:
        """Return a sentence if steps were taken without a snapshot.

        Args:
          params: Not used.
        """
        del params
        if not can_be_seen(self.count) or not np.any(np.asarray(self.count) > 0):
            return []
        return missing_snapshot(self.snapshot, _IN_FIT)

    def with_snapshot(self, params: Params, full_grad: Updates) -> SvrgState:
        """Return the state with a snapshot at given params, if the params and the gradient are finite.

        Args:
          params: All params.
          full_grad: The full gradient at these params.
        """
        return self._replace(snapshot=install_snapshot(self.snapshot, params, full_grad)[0])


class RecursiveGradientState(NamedTuple):
    """State of `recursive_gradient`.

    Attributes:
      count: Number of steps taken.
      key: Data of the threefry key for the random draws of `probability`.
      snapshot: The last params, and the estimate of the full gradient at these params.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    snapshot: Snapshot

    def with_snapshot(self, params: Params, full_grad: Updates) -> RecursiveGradientState:
        """Return the state with an estimate at given params, if the params and the gradient are finite.

        Args:
          params: All params.
          full_grad: The full gradient at these params.
        """
        return self._replace(snapshot=install_snapshot(self.snapshot, params, full_grad)[0])


def svrg(
    coefficient: optax.ScalarOrSchedule = 1.0,
    *,
    every: int | jax.Array | None = None,
    probability: optax.ScalarOrSchedule | None = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Correct the gradient of a batch by the batch's error at a snapshot of the params.

    .. math::
      g_t = \nabla f_{B_t}(\theta_t) - c_t (\nabla f_{B_t}(\tilde\theta) - \mu), \qquad
      \mu = \nabla f(\tilde\theta)

    where :math:`\tilde\theta` are the params at the snapshot and :math:`\mu` is their full gradient. The
    correction has mean zero over batches, so the gradient stays unbiased. With :math:`c_t = 1`, its
    variance goes to zero as :math:`\theta_t` and :math:`\tilde\theta` approach an optimum. Therefore
    SGD with a constant learning rate, such as `optax.chain(optperm.svrg(), optax.sgd(0.025))`,
    converges up to the rounding of the params, with or without momentum. Before the first snapshot,
    gradients pass through unchanged.

    You can take snapshots in three ways:

    - between steps, every few epochs, with `optperm.variance.full_gradient` and
      `optperm.variance.take_snapshot`;
    - `every` m: inside the compiled step, at the start of steps 0, m, 2m, ...;
    - `probability` p: loopless SVRG, where :math:`\tilde\theta_{t+1} = \theta_t` with probability p,
      else :math:`\tilde\theta_t`, and :math:`\tilde\theta_0 = \theta_0`. All replicas draw the same
      random numbers.

    Args:
      coefficient: :math:`c_t \ge 0`, a number or a schedule. SVRG uses 1. In :math:`\alpha`-SVRG, the
        coefficient decreases linearly during training, for example from 0.75 to 0.
      every: m, the number of steps from one snapshot to the next.
      probability: p, in [0, 1], the probability of a snapshot in a step, a number or a schedule.
      key: The random key of the snapshots: an int or a `jax.random.key`.

    Returns:
      A transformation whose state is an `SvrgState`. Its `update` needs `params` and the extra argument
      `grad_fn(params)` of `optperm.evaluate`, the gradient on this batch at given params. To
      take snapshots inside the step, it also needs `full_grad_fn(params)`, the gradient over all
      examples. You can pass `optperm.evaluate(loss_fn, params, all_examples).extra_args["grad_fn"]`, but
      outside `jax.jit`, this call evaluates all examples in each step.

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
      ...     full_grad = optperm.variance.full_gradient(loss_fn, w, batches)
      ...     opt_state = optperm.variance.take_snapshot(opt_state, w, full_grad)
      ...     for batch in batches:
      ...         w, opt_state = step(w, opt_state, batch)
      >>> bool(jnp.linalg.norm(jax.grad(loss_fn)(w, (x, y))) < 1e-5)  # the optimum, despite the noise
      True

    Notes:
      SVRG pays off on convex problems that need high accuracy. On networks, even small networks, it
      *hurts*. The gradient soon differs from its value at the snapshot, the correction adds variance,
      and plain SGD takes more than twice as many steps for the same number of gradients.
      :math:`\alpha`-SVRG weakens the correction; a step with a coefficient of 0 costs little more than a
      step without SVRG. Any optimizer may follow `svrg`, but Adam with a constant learning rate does not
      converge to the optimum, because it divides by a running average of the gradients' magnitude.

      Both gradients of a step use the same batch. Draw random numbers, such as dropout masks, from a key
      in the batch, so that both gradients use the same numbers. Put `svrg` before accumulation
      (`optax.MultiSteps`), clipping and weight decay, because it subtracts untransformed gradients.

      An unstable learning rate does not always produce NaNs. If gradients are bounded, as in logistic
      regression, the loss stays finite but rises above its initial value. Compare the loss over all
      examples with its value before the first step, and find the rate with
      `optperm.variance.svrg_learning_rate`, especially for unscaled features.

    Raises:
      TypeError: If a number has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, both `every` and `probability` are given, a needed
        extra argument is missing, or the trees passed to `update` do not match.

    References:
      Johnson and Zhang, `Accelerating Stochastic Gradient Descent using Predictive Variance Reduction
      <https://papers.nips.cc/paper/4937>`_, NeurIPS 2013

      Kovalev, Horvath and Richtarik, `Don't Jump Through Hoops and Remove Those Loops: SVRG and Katyusha
      are Better Without the Outer Loop <https://arxiv.org/abs/1901.08689>`_, ALT 2020

      Yin et al., `A Coefficient Makes SVRG Effective <https://arxiv.org/abs/2311.05589>`_, ICLR 2025
    """
    checks.check_in_range("coefficient", coefficient, 0.0, float("inf"))
    needs = list_extra_args(every, probability)
    checks.check_key("key", key)

    def init(params: Params) -> SvrgState:
        return make_state(params, key)

    def update(
        grads: Updates,
        state: SvrgState,
        params: Params,
        *,
        grad_fn: GradFn,
        full_grad_fn: Any = None,  # needed for snapshots
        **_: Any,
    ) -> tuple[Updates, SvrgState]:
        c = resolve_schedule("coefficient", coefficient, state.count, float)
        count = optax.safe_increment(state.count)
        if probability is not None:
            new_grads, snapshot = correct_loopless(
                state,
                c,
                probability,
                grads,
                params,
                at=params,
                grad_fn=grad_fn,
                full_grad_fn=full_grad_fn,
            )
            return new_grads, SvrgState(count, state.key, snapshot)

        # theta~ <- theta, mu <- grad f(theta), every m steps, before the correction
        def renew() -> Snapshot:
            return install_snapshot(state.snapshot, params, full_grad_fn(params))[0]

        snapshot = state.snapshot
        if every is not None:
            is_time = is_due(state, every, None)
            snapshot = cond(is_time, renew, lambda: state.snapshot)
        else:
            for text in missing_snapshot(snapshot):
                warnings.warn(text, RuntimeWarning, stacklevel=2)

        # g_t = grad f_B(theta) - c_t (grad f_B(theta~) - mu)
        new_grads = correct_gradient(snapshot, c, grads, params, grad_fn=grad_fn)
        return new_grads, SvrgState(count, state.key, snapshot)

    return transformation(
        init,
        update,
        method="svrg",
        like=lambda state: state.snapshot.params,
        dtypes=True,
        needs=needs,
    )


def correct_gradient(
    snapshot: Snapshot,
    c: jax.Array,
    grads: Updates,
    params: Params,
    *,
    grad_fn: GradFn,
) -> Updates:
    r"""Return the gradient minus its batch's error at a snapshot, in float32 or wider.

    .. math::
      g - c (\nabla f_B(\tilde\theta) - \mu)

    If an entry of the result is not finite in the dtype of its parameter, the entry of g replaces it.
    Without a snapshot, or with a coefficient of zero, the result is g.
    """
    is_used = snapshot.is_taken & (c != 0.0)
    # Only this gradient is conditional. The rest is one pass over the params, which XLA fuses with the
    # following operations.
    at_snapshot = cond(
        is_used,
        lambda: cast_like(evaluate_gradient(snapshot.params, grad_fn), snapshot.full_grad),
        lambda: optax.tree.zeros_like(snapshot.full_grad),
    )

    def correct(g: Any, g_snapshot: jax.Array, mu: jax.Array, theta: Any) -> jax.Array:
        wide = accumulation_dtype((mu, g))
        g, g_snapshot, mu, c_t = (jnp.asarray(x, wide) for x in (g, g_snapshot, mu, c))
        # In this order of g - c (g_snapshot - mu), large, nearly equal numbers cancel exactly.
        new = (g - c_t * g_snapshot) + c_t * mu
        return jnp.where(is_used & jnp.isfinite(new.astype(jnp.result_type(theta))), new, g)

    return jax.tree.map(correct, grads, at_snapshot, snapshot.full_grad, params)


def correct_loopless(
    state: SvrgState,
    c: jax.Array,
    probability: optax.ScalarOrSchedule,
    grads: Updates,
    params: Params,
    *,
    at: Params,
    grad_fn: GradFn,
    full_grad_fn: GradFn,
) -> tuple[Updates, Snapshot]:
    r"""Return the corrected gradient of a step of loopless SVRG, and the snapshot for the next step.

    .. math::
      \tilde\theta_{t+1} = \text{at with probability p, else } \tilde\theta_t

    The old snapshot is read before the new snapshot overwrites its buffers. The first step takes and
    uses its own snapshot.
    """

    def correct(snapshot: Snapshot, grad_fn: GradFn) -> Updates:
        return cast_like(
            correct_gradient(snapshot, c, grads, params, grad_fn=grad_fn), state.snapshot.full_grad
        )

    def renew(new_grads: Updates) -> tuple[Updates, Snapshot]:
        new, _ = install_snapshot(state.snapshot, at, full_grad_fn(at))
        first = correct(new, lambda _: grads)
        return optax.tree.where(state.snapshot.is_taken, new_grads, first), new

    new_grads = correct(state.snapshot, grad_fn)
    is_time = is_due(state, None, probability)
    return cond(is_time, renew, lambda g: (g, state.snapshot), new_grads)


def make_state(params: Params, key: int | jax.Array) -> SvrgState:
    """Make a state without a snapshot."""
    return SvrgState(
        count=jnp.zeros([], jnp.int32),
        key=key_data(key),
        snapshot=Snapshot(
            is_taken=varying_zeros(params, bool),
            params=jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), params),
            full_grad=jax.tree.map(
                lambda leaf: jnp.zeros_like(leaf, accumulation_dtype(leaf)), params
            ),
        ),
    )


def install_snapshot(
    old: Snapshot, params: Params, full_grad: Updates
) -> tuple[Snapshot, jax.Array]:
    """Return the new snapshot if finite, else the old snapshot, and whether the new one is finite."""
    params, full_grad = mask_like(params, old.params), mask_like(full_grad, old.params)
    source = "the optimizer state"
    checks.check_same_tree("params", params, old.params, source=source)
    checks.check_same_tree("full_grad", full_grad, old.params, source=source, dtypes=False)
    params, full_grad = cast_like((params, full_grad), (old.params, old.full_grad))
    is_finite = all_finite((params, full_grad))
    new = Snapshot(is_taken=jnp.ones_like(old.is_taken), params=params, full_grad=full_grad)
    return optax.tree.where(is_finite, new, old), is_finite


def list_extra_args(
    every: int | jax.Array | None, probability: optax.ScalarOrSchedule | None
) -> dict[str, str]:
    """Check `every` and `probability`, and return the extra arguments that the method needs."""
    if every is not None:
        checks.check_count("every", every)
    if probability is not None:
        checks.check_in_range("probability", probability, 0.0, 1.0)
        if every is not None:
            raise ValueError("Pass every= or probability=, not both.")
    needs_all = every is not None or probability is not None
    return BATCH_GRADIENT | (FULL_GRADIENT if needs_all else {})


def is_due(
    state: SvrgState | RecursiveGradientState,
    every: int | jax.Array | None,
    probability: optax.ScalarOrSchedule | None,
) -> jax.Array:
    """Return whether this step needs the full gradient, with the same result on all replicas."""
    if probability is None:
        return state.count % jnp.asarray(every, jnp.int32) == 0
    key = as_key(state.key)
    p = resolve_schedule("probability", probability, state.count, high=1.0)
    # Before the first snapshot, a snapshot is always due.
    coin = jax.random.bernoulli(jax.random.fold_in(key, state.count), p)
    return coin | ~state.snapshot.is_taken


def missing_snapshot(snapshot: Snapshot, advice: str = _ADVICE) -> list[str]:
    """Return a sentence if Python can see that there is no snapshot for the correction."""
    if not can_be_seen(snapshot.is_taken) or np.asarray(snapshot.is_taken).all():
        return []
    return [f"svrg has no snapshot yet, so gradients pass through unchanged: {advice}."]


def take_snapshot(opt_state: Any, params: Params, full_grad: Updates) -> Any:
    r"""Set a new snapshot of `svrg`, or a new estimate of `recursive_gradient`, in an optimizer state.

    .. math::
      \tilde\theta \leftarrow \theta, \qquad \mu \leftarrow \nabla f(\theta)

    Args:
      opt_state: The state of an optimizer with `optperm.svrg` or `optperm.recursive_gradient` anywhere
        in it: in a chain, inside `optax.masked`, `optax.partition` or `optax.inject_hyperparams`, or
        stored as variables by `flax.nnx.Optimizer`. This function does not change `opt_state`.
      params: All current params, including masked params; they are copied. For the states of many
        training runs, use `jax.vmap(optperm.variance.take_snapshot)`.
      full_grad: The full gradient at these params, from `optperm.variance.full_gradient`.

    Returns:
      The optimizer state, with the same structure, shapes and dtypes. If the params or the full gradient
      are not finite, the old snapshot stays, with a warning if the values are not traced.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> tx = optax.chain(optperm.svrg(), optax.adam(0.1))
      >>> opt_state = tx.init(params)
      >>> opt_state = optperm.variance.take_snapshot(opt_state, params, {"w": jnp.array([0.5, 0.0])})
      >>> opt_state[0].snapshot.full_grad["w"].tolist()
      [0.5, 0.0]

    Raises:
      ValueError: If `opt_state` does not contain exactly one `SvrgState` or `RecursiveGradientState`, or
        the trees do not match.
    """
    state: Any = find_state(opt_state, (SvrgState, RecursiveGradientState), method="svrg")
    snapshot, is_finite = install_snapshot(
        state.snapshot, without_variables(params), without_variables(full_grad)
    )
    if not isinstance(is_finite, jax.core.Tracer) and not is_finite:
        message = "The snapshot was not taken: the params or their full gradient are not finite."
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    new = state._replace(snapshot=snapshot)
    return replace_state(opt_state, type(state), new, method="svrg")
