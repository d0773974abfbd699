"""The constant SGD of Mandt, Hoffman and Blei, with step sizes from the noise of the gradients alone.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017, section 4.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._covariance import (
    ESTIMATES,
    NEEDS,
    BatchGradients,
    Estimator,
    batch_gradients,
    check_noise_arguments,
)
from optperm.bayes._faults import are_seen, judge_mean, judge_stability, judge_temperature
from optperm.bayes._forms import FORMS, Form, Full, Preconditioner, update_mean
from optperm.bayes._kernel import precondition
from optperm.bayes._power_iteration import power_iteration
from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.core.fingerprints import UNSET
from optperm.core.keys import key_data
from optperm.core.mapped_axes import AxisName, mark_varying, varying_axes
from optperm.core.noise import normal_like
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.states import ForLoop
from optperm.core.transformation import transformation

_UNSTABLE = 2.0
# While C is updated, lambda_max(H A) is estimated in the first hundred steps, then in every hundredth.
_PROBES = 100
# After this many estimates with "per_example", every fourth step has an estimate.
_DENSE, _ESTIMATE_EVERY = 1000, 4


class MandtSgdState(NamedTuple):
    r"""State of `mandt_sgd`.

    Attributes:
      count: Number of steps taken.
      steps: Number of steps that sampled.
      unstable: Number of steps not taken because they would diverge.
      uneven: Number of estimates for which the batch's gradient was not the mean of its examples'
        gradients.
      left_out: Number of sampling steps that left out entries with a nonfinite gradient.
      estimates: Number of estimates of C.
      covariance: The mean of the estimates: (D, D), a tree like params, or the mean of its diagonal.
      basis: The form of the preconditioner. W of the full form contains the eigenvectors of C.
      noise: :math:`\Lambda = W^\top C W`: the eigenvalues (D,), a tree like params, or one number.
      sizes: h of the last step, or of `noise` in the full form, with the structure of `noise`.
      stability: :math:`\eta \lambda_{\max}(H A) (1 - \mu) / (1 + \mu)`; 0 before its first estimate.
      direction: The vector of the power iteration for :math:`\lambda_{\max}(H A)`, a tree like params.
      fingerprint: A number for each of the arguments of `shaped_by`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    steps: Int32[Array, ""]
    unstable: Int32[Array, ""]
    uneven: Int32[Array, ""]
    left_out: Int32[Array, ""]
    estimates: Int32[Array, ""]
    covariance: PyTree[Float[Array, "..."]]
    basis: Form
    noise: PyTree[Float[Array, "..."]]
    sizes: PyTree[Float[Array, "..."]]
    stability: Float32[Array, ""]
    direction: PyTree[Float[Array, "?*shape"], "Params"]
    fingerprint: UInt32[Array, "2"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the names of the arguments in the fingerprint."""
        return "preconditioner", "momentum"

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement."""
        return ForLoop(draws_examples=True)

    def preconditioned(self, grads: Updates) -> Updates:
        """Return H g with the step sizes of the last update.

        Args:
          grads: g, a tree like the params.
        """
        return precondition(self.basis, self.sizes, grads)

    def warnings(self, params: Any = None) -> list[str]:
        """Return reasons why draws may not follow the posterior, as far as Python can see them.

        Args:
          params: Not used.

        Raises:
          ValueError: If steps were not taken because they would diverge.
        """
        del params
        if not are_seen(self):
            return []
        if np.any(np.asarray(self.unstable) > 0):
            raise ValueError(
                "Steps were not taken, because they would diverge: lambda_max(H A) of the steps, "
                "corrected for momentum, must be below 2, and the last estimate is "
                f"{float(np.max(self.stability)):.3g}. Use constant_sgd, smaller batches, a "
                "smaller max_step or more damping."
            )
        found = judge_stability(self.stability, self.steps, "max_step")
        # Only at a temperature of 0, all steps have the length 0
        sizes = jax.tree.leaves(self.sizes)
        if all(map(can_be_seen, sizes)):
            longest = max((np.max(h, initial=0.0) for h in sizes), default=1.0)
            found += judge_temperature(self.steps, np.float32(longest))
        return found + judge_mean(self.uneven, np.asarray(self.estimates))


def mandt_sgd(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    *,
    preconditioner: Preconditioner = "diagonal",
    estimator: Estimator = "per_example",
    learning_rate: optax.ScalarOrSchedule = 1.0,
    momentum: float | jax.Array | None = None,
    temperature: optax.ScalarOrSchedule = 1.0,
    max_step: float | jax.Array | None = None,
    damping: float | jax.Array = 0.0,
    freeze_after: int | jax.Array | None = None,
    chunk_size: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sample with SGD that is preconditioned by its gradient noise, as Mandt, Hoffman and Blei do.

    .. math::
      v_t = \mu v_{t-1} + H g_t, \qquad \theta_{t+1} = \theta_t - \eta (1 - \mu) v_t

    For batches of :math:`S` examples and the covariance :math:`C` of one example's gradient,

    .. math::
      H = \frac{2 S T}{N} \frac{D}{\operatorname{tr} C} I \quad (\text{scalar}), \qquad
      H_{kk} = \frac{2 S T}{N C_{kk}} \quad (\text{diagonal}), \qquad
      H = \frac{2 S T}{N} C^{-1} \quad (\text{full})

    Near an optimum, the posterior is :math:`N(\theta^*, T (N A)^{-1})`, where :math:`A` is the Hessian
    of the mean loss. Each H is the matrix of its kind whose stationary distribution is closest to the
    posterior; with the full H, the two are equal to first order in :math:`\lambda_{\max}(H A)`. The
    eigenvalue must be well below 2, which `optperm.constant_sgd` ensures, but `mandt_sgd` does not. A
    diagonal H is not always better than a scalar H.

    C is the mean of all estimates, and the first step only estimates C. To reach an optimum with another
    optimizer first, use `optperm.switch_after`, with `track=True` for estimates from its steps. There is
    one estimate per step; with "per_example" and a diagonal or
    scalar H, there is one per four steps after the first thousand steps. A step uses the C of the
    previous step. The full preconditioner decomposes C when the number of estimates is :math:`2^k` or
    :math:`3 \cdot 2^k`.

    Args:
      num_data: N, the number of training examples.
      batch_size: S, the number of examples in a batch, over all replicas.
      preconditioner: "scalar", "diagonal" or "full".
      estimator: "per_example", "single_example" or "two_batches", as for `optperm.constant_sgd`.
      learning_rate: :math:`\eta`, a number or a schedule; 1 for sampling.
      momentum: :math:`\mu`, in [0, 1); None for no momentum.
      temperature: T, a factor that multiplies the posterior's covariance, a number or a schedule.
      max_step: The maximum eigenvalue of H; None for no limit. A limit changes the stationary
        distribution.
      damping: The minimum eigenvalue of C, in the units of C.
      freeze_after: The number of steps after which C is constant; None to always update C.
      chunk_size: The number of per-example gradients held in memory at once. None for a million entries
        in total, but at least 8 gradients.
      axis_name: The mapped axis or axes over which each batch is spread. The gradients must already be
        averaged over them.

    Returns:
      A transformation whose `update` needs `params` and the estimator's extra argument. With `grad_fn`,
      it skips steps that would diverge; `unstable` in the state counts them.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> data = 3.0 + jax.random.normal(jax.random.key(0), (1000,))
      >>> loss_fn = lambda mean, batch: jnp.mean((batch - mean) ** 2) / 2  # the posterior: N(3, 1/1000)
      >>> tx = optperm.mandt_sgd(1000, 10)
      >>> def step(carry, key):
      ...     mean, opt_state = carry
      ...     e = optperm.evaluate(loss_fn, mean, jax.random.choice(key, data, (10,)))
      ...     updates, opt_state = tx.update(e.grad, opt_state, mean, **e.extra_args)
      ...     mean = optax.apply_updates(mean, updates)
      ...     return (mean, opt_state), mean
      >>> start = jnp.array(3.0), tx.init(jnp.array(3.0))
      >>> _, means = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 20_000))
      >>> bool(abs(1000 * jnp.var(means) - 1.0) < 0.2)
      True

    Notes:
      An entry without noise has the step size `max_step`; without `max_step` and `damping`, it does not
      move. If the noise vanishes, as in a network that fits its data, step sizes diverge: set
      `max_step`. Without `damping`, the full preconditioner takes no step until it has seen about 2 D
      examples. Draw batches with replacement.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, an extra argument is missing, the size of a batch is
        not `batch_size`, or the trees passed to `update` do not match.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017, section 4
    """
    check_noise_arguments(num_data, batch_size, preconditioner, estimator, chunk_size, axis_name)
    for name, number in (("learning_rate", learning_rate), ("temperature", temperature)):
        checks.check_in_range(name, number, 0.0, float("inf"))
    mu: Any = 0.0 if momentum is None else momentum
    checks.check_decay("momentum", mu)
    checks.check_in_range("damping", damping, 0.0, float("inf"), may_be_schedule=False)
    if max_step is not None:
        checks.check_positive("max_step", max_step)
    if freeze_after is not None:
        checks.check_count("freeze_after", freeze_after)
    is_full = preconditioner == "full"

    def init(params: Params) -> MandtSgdState:
        basis = FORMS[preconditioner].like(params)
        rows = jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
        return MandtSgdState(
            count=jnp.zeros([], jnp.int32),
            steps=jnp.zeros([], jnp.int32),
            unstable=jnp.zeros([], jnp.int32),
            uneven=jnp.zeros([], jnp.int32),
            left_out=jnp.zeros([], jnp.int32),
            estimates=jnp.zeros([], jnp.int32),
            covariance=basis.outer(rows),
            basis=basis,
            noise=basis.zeros(params),
            sizes=basis.zeros(params),
            stability=mark_varying(jnp.zeros([], jnp.float32), varying_axes(params)),
            direction=normal_like(key_data(0), params),
        )

    def step_sizes(noise: Any, count: jax.Array) -> Any:
        """Return h = min(2 S T / (N max(Lambda, damping)), max_step)."""

        def of_entry(noise: jax.Array) -> jax.Array:
            t = resolve_schedule("temperature", temperature, count, noise.dtype)
            s, n, least = (jnp.asarray(x, noise.dtype) for x in (batch_size, num_data, damping))
            most = jnp.asarray(jnp.inf if max_step is None else max_step, noise.dtype)
            h = jnp.minimum(2 * s / n * t / jnp.maximum(noise, least), most)
            return jnp.where(jnp.isfinite(h), h, 0.0)

        return jax.tree.map(of_entry, noise)

    def update(
        g: Updates, state: MandtSgdState, params: Params, **extra_args: Any
    ) -> tuple[Updates, MandtSgdState]:
        if not jax.tree.leaves(params):  # an empty part of optax.partition
            return g, state._replace(count=optax.safe_increment(state.count))
        count = state.count
        batch = batch_gradients(g, params, extra_args, batch_size, chunk_size, axis_name)

        # H g = W diag(h) W^T g uses the C of the previous step, since this batch's C would bias the step
        h, basis = step_sizes(state.noise, count), state.basis
        h_g = basis.params_of(basis.times(h, basis.coordinates(g, h)), params)
        is_due = _is_known(state, batch_size, damping)
        is_moving = is_due & (state.stability < _UNSTABLE)
        moves = jax.tree.map(lambda x: jnp.where(is_moving & jnp.isfinite(x), x, 0.0), h_g)

        is_learning: Any = jnp.array(True) if freeze_after is None else count < freeze_after
        is_open = is_learning
        if estimator == "per_example" and not is_full:
            is_open &= (count < _DENSE) | (count % _ESTIMATE_EVERY == 0)
        following = when(
            is_open,
            lambda state: _estimate(state, batch, estimator, is_full),
            state,
        )
        if extra_args.get("grad_fn") is not None:
            # With the H of this step and momentum, steps are stable if the eigenvalue is below 2
            rate = resolve_schedule("learning_rate", learning_rate, count)
            factor = rate * (1 - mu) / (1 + mu)
            scaled = jax.tree.map(lambda h: h * jnp.asarray(factor, h.dtype), h)
            is_probed = is_learning & ((count < _PROBES) | (count % _PROBES == 0))
            stability, direction = when(
                is_probed & _is_known(state, batch_size, damping),
                lambda known: power_iteration(
                    *known, lambda s: precondition(basis, scaled, s), batch.curvature_product,
                    jnp.minimum(count, _PROBES),
                ),
                (state.stability, state.direction),
            )  # fmt: skip
            following = following._replace(stability=stability, direction=direction)
        return cast_like(moves, params), following._replace(
            count=optax.safe_increment(count),
            steps=state.steps + is_moving.astype(jnp.int32),
            left_out=state.left_out + (is_moving & ~all_finite(h_g)).astype(jnp.int32),
            unstable=state.unstable + (is_due & ~is_moving).astype(jnp.int32),
            # A decomposition in this step has changed the basis, to which h does not belong.
            sizes=step_sizes(following.noise, count) if is_full else h,
        )

    sampler = transformation(
        init,
        update,
        method="mandt_sgd",
        like=lambda state: state.direction,
        needs=NEEDS[estimator],
        axis_name=axis_name,
        takes_gradient=True,
        shape_arguments=lambda _: {
            "preconditioner": preconditioner,
            "momentum": momentum is not None,
        },
    )

    def rate(count: jax.Array) -> jax.Array:
        return (1 - mu) * resolve_schedule("learning_rate", learning_rate, count)

    # theta' = theta - eta (1 - mu) v', v' = mu v + H g
    velocity = optax.identity() if momentum is None else optax.trace(momentum)
    steps = [sampler, velocity, optax.scale_by_learning_rate(rate)]
    chain = optax.with_extra_args_support(optax.chain(*steps))
    return with_remainders(chain, method="mandt_sgd")


def _is_known(state: MandtSgdState, batch_size: Any, damping: Any) -> jax.Array:
    """Return whether C is known; without damping, a full C needs about 2 D examples."""
    needed = 2 * state.basis.num_needed(state.noise)
    is_enough = state.estimates * (batch_size - 1) >= needed
    return (state.estimates > 0) & (is_enough | (damping > 0))


def _estimate(
    state: MandtSgdState,
    batch: BatchGradients,
    estimator: Estimator,
    is_full: bool,
) -> MandtSgdState:
    """Return the state with one more estimate of C, if finite, and the eigenvalues of C."""
    # C <- C + (C^ - C) / n
    c_hat, is_uneven = ESTIMATES[estimator](batch, state.basis.outer)
    n = state.estimates + 1
    covariance = update_mean(state.covariance, c_hat, n.astype(jnp.float32))
    noise: Any = covariance
    basis: Any = state.basis
    if is_full:
        # C = W diag(Lambda) W^T, when n is 2^k or 3 2^k
        third = n // 3
        is_due = (n & (n - 1) == 0) | ((n % 3 == 0) & (third & (third - 1) == 0))
        noise, w = when(
            is_due, lambda _: tuple(jnp.linalg.eigh(covariance)), (state.noise, basis.w)
        )
        noise, basis = jnp.maximum(noise, 0.0), Full(w)
    new = state._replace(
        estimates=n,
        covariance=covariance,
        basis=basis,
        noise=noise,
        uneven=state.uneven + is_uneven.astype(jnp.int32),
    )
    return optax.tree.where(all_finite(c_hat), new, state)
