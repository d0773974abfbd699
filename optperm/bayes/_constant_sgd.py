"""Constant SGD: SGD with constant step sizes, whose iterates are samples from a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017, with injected noise whose covariance fits the problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._burn_in import after_burn_in
from optperm.bayes._covariance import NEEDS, Estimator, batch_gradients, check_noise_arguments
from optperm.bayes._diagonal_newton import diagonal_newton
from optperm.bayes._faults import (
    are_seen,
    judge_kernel,
    judge_mean,
    judge_stability,
    judge_temperature,
)
from optperm.bayes._forms import FORMS, Preconditioner
from optperm.bayes._kernel import NoiseKernel, check_kernel
from optperm.bayes._remainders import with_remainders
from optperm.bayes._schedule import make_schedule
from optperm.bayes._warmup import begin, warm_up
from optperm.core import checks
from optperm.core.dtypes import all_finite, cast_like, computed_once
from optperm.core.fingerprints import UNSET
from optperm.core.keys import key_data
from optperm.core.mapped_axes import AxisName
from optperm.core.noise import fold, three_point_like
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float32, Int32, Params, UInt32, Updates
from optperm.core.states import ForLoop
from optperm.core.transformation import transformation

_LARGEST_FULL = 4096
_NEEDS_CURVATURE = {"grad_fn": "the gradient of the batch at given params"}


class ConstantSgdState(NamedTuple):
    """State of `constant_sgd`.

    Attributes:
      count: Number of steps taken.
      steps: Number of steps that sampled.
      uneven: Number of estimates, in steps that sampled, for which the batch's gradient was not the mean
        of its examples' gradients.
      left_out: Number of sampling steps that left out entries with a nonfinite gradient.
      freeze_after: The first step in which nothing is learned.
      key: The raw random key of the injected noise.
      scale: s = 2 S T / N of the last step.
      limit: c times the `learning_rate` of the last step.
      kernel: The noise, the curvature and the basis of the steps.
      window: The statistics of the current window of the warm-up; () if a kernel was passed.
      fingerprint: A number for each of the arguments of `shaped_by`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    steps: Int32[Array, ""]
    uneven: Int32[Array, ""]
    left_out: Int32[Array, ""]
    freeze_after: Int32[Array, ""]
    key: UInt32[Array, "2"]
    scale: Float32[Array, ""]
    limit: Float32[Array, ""]
    kernel: NoiseKernel
    window: Any  # Window, or ()
    fingerprint: UInt32[Array, "4"] = UNSET

    def shaped_by(self) -> tuple[str, ...]:
        """Return the arguments for which the state is made, so that no other arguments misread it."""
        return "preconditioner", "num_data", "batch_size", "momentum"

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement, and the number of training examples."""
        return ForLoop(draws_examples=True, num_data=self.kernel.num_data)

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Return c times the `learning_rate`, and the temperature, of the last step."""
        size, n = (
            jnp.asarray(x, jnp.float32) for x in (self.kernel.batch_size, self.kernel.num_data)
        )
        return self.limit, self.scale * n / (2 * size)

    def preconditioned(self, grads: Updates) -> Updates:
        """Return H g with the step sizes of the last update, exactly only for a `learning_rate` of 1.

        Args:
          grads: g, a tree like the params.
        """
        return self.kernel.precondition(
            grads, self.kernel.step_sizes(self.scale, self.limit / self.kernel.max_stability)
        )

    def warnings(self, params: Any = None) -> list[str]:
        """Return reasons why draws may not follow the posterior, as far as Python can see them.

        Args:
          params: Not used.
        """
        del params
        if not are_seen(self):
            return []
        found = judge_stability(self.kernel.stability, self.steps, "stability")
        found += judge_temperature(self.count, self.scale)
        if np.any(np.asarray(self.count) < np.asarray(self.freeze_after)):
            return found
        # The last window contains about half of all estimates from steps that sampled
        estimates = 2 * np.asarray(self.kernel.estimates)
        return [*found, *judge_kernel(self.kernel), *judge_mean(self.uneven, estimates)]


def constant_sgd(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    *,
    preconditioner: Preconditioner | None = None,
    estimator: Estimator = "per_example",
    learning_rate: optax.ScalarOrSchedule = 1.0,
    momentum: float | jax.Array | None = None,
    temperature: optax.ScalarOrSchedule = 1.0,
    stability: float | jax.Array = 0.2,
    noise_ratio: float | jax.Array = 10.0,
    burn_in: int | jax.Array = 4000,
    freeze_after: int | jax.Array | None = None,
    burn_in_optimizer: optax.GradientTransformation | None = None,
    key: int | jax.Array = 0,
    kernel: NoiseKernel | None = None,
    chunk_size: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Sample from the posterior with SGD and constant step sizes.

    .. math::
      v_t = \mu v_{t-1} + H (g_t + \xi_t), \qquad \theta_{t+1} = \theta_t - (1 - \mu) v_t

    The loss is :math:`L = \frac{1}{N} \sum_n \ell_n` with
    :math:`\ell_n(\theta) = -\log p(x_n | \theta) - \frac{1}{N} \log p(\theta)`; it includes the prior
    (`optperm.bayes.normal_prior`). Batches have :math:`S` examples, :math:`C` is the covariance of one
    example's gradient, and :math:`A` is the Hessian of :math:`L`. With injected noise :math:`\xi`, the
    step in each direction can be as short as stability requires:

    .. math::
      W^\top C W = \operatorname{diag}(\Lambda), \qquad H = W \operatorname{diag}(h) W^\top, \qquad
      h_i = \frac{s}{\max(\Lambda_i (1 + 1 / \rho), s a_i / c)}, \quad s = \frac{2 S T}{N}

    and :math:`\xi = W^{-\top} \operatorname{diag}(\sqrt{b / S}) z` with
    :math:`b_i = s / h_i - \Lambda_i` and z of mean 0 and variance 1. The noise of a step therefore has
    the covariance :math:`(2 T / N) H` for any such h. Near an optimum, the draws follow
    :math:`N(\theta^*, T (N A)^{-1})`, to first order in c. In every direction, the chain moves as
    fast as c and the noise of the batches allow, even if the posterior is long and narrow. Without
    injected noise, this is the method of Mandt, Hoffman and Blei (`optperm.mandt_sgd`); without noise
    from the batches, this is Langevin dynamics.

    In the burn-in, another optimizer moves the params to an optimum. From the second half of the burn-in
    to `freeze_after`, five windows estimate :math:`C`, :math:`a_i` (Hutchinson's estimator in the
    coordinates of :math:`H^{1/2}`) and the spread of the batches' curvatures. Two further estimates may
    lower :math:`\rho`: the variation of the noise with the params and, if :math:`W = I`, the correlation
    of the noise. Each window passes its estimates to the next window as an `optperm.bayes.NoiseKernel`.
    After the last window, the kernel is constant. If you pass this kernel as `kernel`, every step
    samples.

    Args:
      num_data: N, the number of training examples.
      batch_size: S, the number of examples in a batch, over all replicas.
      preconditioner: "full", "diagonal" (:math:`W = I`) or "scalar" (one h). None for "full" up to 4,096
        params, and for "diagonal" above.
      estimator: The estimator of C: "per_example", from the extra argument `per_example_grad_fn`;
        "single_example", from `example_grad_fn`; or "two_batches", from `grad_fn`, for losses that mix
        examples.
      learning_rate: A factor that multiplies `stability` and `noise_ratio`, a number or a schedule. It
        does not change the stationary distribution to first order in c.
      momentum: :math:`\mu`, in [0, 1). None for :math:`\min(0.9, (S - 1) / (S + 1))`. At the same
        stability, momentum makes steps :math:`(1 + \mu) / (1 - \mu)` times as long.
      temperature: T, a factor that multiplies the posterior's covariance, a number or a schedule.
      stability: c, in (0, 2), the maximum eigenvalue of :math:`H A (1 - \mu) / (1 + \mu)`. Variances are
        too large by a fraction of up to about c / 2.
      noise_ratio: The maximum of :math:`\rho`, the ratio of the batches' noise to the injected noise.
        The warm-up lowers :math:`\rho` if the noise varies with the params or is correlated.
      burn_in: The number of steps before the first step that samples. With 0, the params do not move in
        the first half of `freeze_after`, in which the noise and the curvature are learned.
      freeze_after: The number of steps after which nothing is learned. None for twice `burn_in`, but at
        least `burn_in` + 1,000.
      burn_in_optimizer: The optimizer of the burn-in. None for steps scaled by each parameter's
        curvature; these steps reach distant optima, and depend on the units of features only at the
        maximum length.
      key: A random key for the injected noise, or an int. `optperm.bayes.draw_samples` gives each chain
        its own noise. In your own loop, initialize the state of each chain with a different key.
      kernel: A kernel from `optperm.bayes.adapted_kernel`, for the same model, N, S and momentum. With a
        kernel, every step samples: start at draws of the posterior, or pass a `burn_in` to
        `optperm.bayes.draw_samples`. The state then has no warm-up statistics, and the arguments of the
        warm-up (`estimator`, `noise_ratio`, `burn_in`, `freeze_after`, `burn_in_optimizer`,
        `chunk_size`) have no effect. None for a warm-up.
      chunk_size: The number of per-example gradients held in memory at once. None for a million entries
        in total, but at least 8 gradients.
      axis_name: The mapped axis or axes over which each batch is spread. The gradients must already be
        averaged over them.

    Returns:
      A transformation whose `update` needs `params`. Without `kernel`, it also needs `grad_fn` and the
      estimator's extra argument, which `optperm.evaluate` makes.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (1000, 2))
      >>> y = x @ jnp.array([1.0, 2.0]) + jax.random.normal(jax.random.key(1), (1000,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2
      >>> tx = optperm.constant_sgd(1000, 10, burn_in=1000)
      >>> def step(carry, key):
      ...     w, opt_state = carry
      ...     chosen = jax.random.choice(key, 1000, (10,))
      ...     e = optperm.evaluate(loss_fn, w, (x[chosen], y[chosen]))
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     w = optax.apply_updates(w, updates)
      ...     return (w, opt_state), w
      >>> start = jnp.zeros(2), tx.init(jnp.zeros(2))
      >>> _, draws = jax.lax.scan(step, start, jax.random.split(jax.random.key(2), 30_000))
      >>> exact = jnp.linalg.inv(x.T @ x)  # covariance of the posterior
      >>> bool(jnp.allclose(jnp.cov(draws[2000:].T), exact, atol=2e-4))
      True

    Notes:
      Draw batches with replacement: in a shuffled epoch, the batches' noise is anticorrelated, and the
      draws are too narrow by a fifth or more. The loss must be a mean over examples. A loss that sums
      examples, or mixes them as BatchNorm does, has different noise; with "per_example", `uneven` in
      the state counts the estimates that show such a loss. In a chain, put nothing that changes
      gradients (clipping, `optperm.svrg`, weight decay) before this transformation, and nothing that
      scales updates after it. The diagonal and scalar preconditioners take shorter steps if the noise is
      more correlated. They keep all variances within a fifth of the posterior's, or warn (see
      `optperm.bayes.NoiseKernel` for the bound). With correlated features, they need many steps.

      With D params, the state of the full preconditioner contains two D x D matrices (one with
      `kernel`). The full preconditioner computes two decompositions at the end of each window, and two
      matrix-vector products per step. With `kernel`, the state of the diagonal preconditioner has three
      numbers per parameter. 16-bit params have remainders of 16 bits. To sample again later, save the
      kernel, a tree of arrays, with Orbax or pickle. `optperm.bayes.sample` runs the loop for you, and
      `optperm.bayes.posterior_report` diagnoses the draws.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range; if an extra argument is missing; if the size of a batch
        is not `batch_size`; if the trees passed to `update` do not match; or if `kernel` is not ready,
        has an axis of chains, or belongs to other params or another preconditioner, N, S or momentum.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017
    """
    checks.check_positive("stability", stability)
    checks.check_positive("noise_ratio", noise_ratio)
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    check_noise_arguments(num_data, batch_size, preconditioner, estimator, chunk_size, axis_name)
    checks.check_key("key", key)
    _check_stable(stability, learning_rate)
    mu = _momentum(batch_size) if momentum is None else momentum
    checks.check_decay("momentum", mu)
    numbers = {"num_data": num_data, "batch_size": batch_size, "momentum": mu}
    schedule = make_schedule(burn_in, freeze_after, batch_size, estimator, preconditioner)
    learns = kernel is None

    def form_of(params: Params) -> Preconditioner:
        if kernel is not None:
            return next(name for name, form in FORMS.items() if isinstance(kernel.basis, form))
        return _choose_preconditioner(preconditioner, params)

    def init(params: Params) -> ConstantSgdState:
        window: Any = ()
        if kernel is None:
            given, window = begin(
                params, form_of(params), noise_ratio=noise_ratio, stability=stability, **numbers
            )
        else:
            check_kernel(kernel, params, preconditioner, **numbers)
            # The state may be donated, but the kernel belongs to the caller
            given = jax.tree.map(jnp.array, kernel)
        zero = jnp.zeros_like(given.stability)
        return ConstantSgdState(
            count=jnp.zeros([], jnp.int32),
            steps=jnp.zeros([], jnp.int32),
            uneven=jnp.zeros([], jnp.int32),
            left_out=jnp.zeros([], jnp.int32),
            freeze_after=jnp.asarray(schedule.freeze_after if learns else 0, jnp.int32),
            key=key_data(key),
            scale=zero,
            limit=zero + 1,
            kernel=given,
            window=window,
        )

    def update(
        g: Updates, state: ConstantSgdState, params: Params, **extra_args: Any
    ) -> tuple[Updates, ConstantSgdState]:
        if not jax.tree.leaves(params):  # an empty part of optax.partition
            return g, state._replace(count=optax.safe_increment(state.count))
        count = state.count
        size, n, c = (jnp.asarray(x, jnp.float32) for x in (batch_size, num_data, stability))
        t = resolve_schedule("temperature", temperature, count)
        rate = resolve_schedule("learning_rate", learning_rate, count)
        # s = 2 S T / N
        scale = (2 * size / n * t).astype(jnp.float32)
        kernel, uneven = state.kernel, state.uneven
        window: Any = state.window
        is_sampling = kernel.is_ready
        if learns:
            batch = batch_gradients(g, params, extra_args, batch_size, chunk_size, axis_name)
            kernel, window, uneven = warm_up(
                kernel, window, uneven, batch, estimator, scale, fold(state.key, ~count),
                schedule=schedule, count=count, limit=c, rate=rate, noise_ratio=noise_ratio,
            )  # fmt: skip
            is_sampling = (count >= schedule.burn_in) & kernel.is_ready

        # h_i = s / max(Lambda_i (1 + 1 / rho), s a_i / c), b_i = s / h_i - Lambda_i
        h = kernel.step_sizes(scale, rate)
        b = kernel.injected(h, scale)

        # H (g + xi) = W diag(h) (W^T g + diag(sqrt(b / S)) z), with Cov(xi) = W^-T diag(b) W^-1 / S
        basis = kernel.basis
        z = basis.flat(three_point_like(fold(state.key, count), params))
        xi = basis.times(jax.tree.map(lambda b: jnp.sqrt(b / size.astype(b.dtype)), b), z)
        noisy = optax.tree.add(basis.coordinates(g, h), xi)
        moves = computed_once(basis.params_of(basis.times(h, noisy), params))
        # Without this mask, an entry that becomes NaN would stay NaN
        moves = jax.tree.map(lambda x: jnp.where(is_sampling & jnp.isfinite(x), x, 0.0), moves)
        return cast_like(moves, params), state._replace(
            count=optax.safe_increment(count),
            steps=state.steps + is_sampling.astype(jnp.int32),
            # In the burn-in, a gradient near an optimum can be rounding error alone
            uneven=jnp.where(is_sampling, uneven, state.uneven),
            left_out=state.left_out + (is_sampling & ~all_finite(g)).astype(jnp.int32),
            scale=scale,
            limit=c * rate,
            kernel=kernel,
            window=window,
        )

    sampler = transformation(
        init,
        update,
        method="constant_sgd",
        like=(lambda state: state.window.direction) if learns else None,
        needs=NEEDS[estimator] | _NEEDS_CURVATURE if learns else None,
        axis_name=axis_name,
        takes_gradient=True,
        shape_arguments=lambda params: numbers | {"preconditioner": form_of(params)},
    )
    # theta' = theta - (1 - mu) v', v' = mu v + H (g + xi)
    steps = sampler, optax.trace(mu), optax.scale_by_learning_rate(1 - mu)
    if not learns:
        chain = optax.with_extra_args_support(optax.chain(*steps))
        return with_remainders(chain, method="constant_sgd")
    first = burn_in_optimizer or diagonal_newton(axis_name)
    return after_burn_in(burn_in, first, *steps, method="constant_sgd")


def _check_stable(stability: Any, learning_rate: Any) -> None:
    rate = 1.0 if callable(learning_rate) else learning_rate
    is_seen = checks.is_concrete_number(stability) and checks.is_concrete_number(rate)
    if is_seen and float(stability) * float(rate) >= 2:
        raise ValueError(
            f"stability times learning_rate must be below 2, got {float(stability) * float(rate):g}."
        )


def _momentum(batch_size: int | jax.Array) -> Any:
    """Return the default, with steps min(S, 19) times as long: large batches vary less in curvature."""
    if checks.is_concrete_number(batch_size):
        return min(0.9, (int(batch_size) - 1) / (int(batch_size) + 1))
    size = jnp.asarray(batch_size, jnp.float32)
    return jnp.minimum(0.9, (size - 1) / (size + 1))


def _choose_preconditioner(preconditioner: Preconditioner | None, params: Params) -> Preconditioner:
    """Return the preconditioner; for None, choose it by the number of params."""
    is_small = optax.tree.size(params) <= _LARGEST_FULL
    return preconditioner or ("full" if is_small else "diagonal")
