"""Constant SGD: steps of a constant size whose iterates are samples from a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.bayes.gradient_noise import scaled_by_noise
from optperm.bayes.masters import with_masters
from optperm.bayes.noise_estimates import Estimator, Preconditioner
from optperm.bayes.noise_plan import examples_of_an_estimate, plan
from optperm.bayes.noise_state import GradientNoiseState, warn_if_unstable
from optperm.contract import checks
from optperm.contract.dtypes import zero_if_not_finite
from optperm.contract.mapped_axes import AxisName
from optperm.contract.schedules import resolve_schedule
from optperm.contract.states import find_states
from optperm.contract.transformation import transformation
from optperm.switching import switch_after


def constant_sgd(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    *,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    preconditioner: Preconditioner = "diagonal",
    estimator: Estimator = "per_example",
    momentum: float | jax.Array | None = None,
    temperature: optax.ScalarOrSchedule = 1.0,
    k_coef: float | jax.Array = 1.0,
    t0: float | jax.Array = 10.0,
    burn_in: int | jax.Array | None = None,
    burn_in_optimizer: optax.GradientTransformation | None = None,
    freeze_after: int | jax.Array | None = None,
    estimate_after: int | jax.Array | None = None,
    estimate_every: int | jax.Array | None = None,
    max_step: float | jax.Array | None = None,
    damping: float | jax.Array = 0.0,
    fill: bool = True,
    stability: float | jax.Array = 0.2,
    rho: float | jax.Array = 1.0,
    seed: int | jax.Array = 0,
    chunk_size: int | None = None,
    max_full_size: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD with the constant step sizes at which its iterates are samples from the posterior.

    .. math::
      v_t = \mu v_{t-1} + H (g_t + \xi_t), \qquad \theta_{t+1} = \theta_t - \eta (1 - \mu) v_t

    with the :math:`H` and the filled noise :math:`\xi_t` of `optperm.scale_by_gradient_noise`,
    which says what it needs of the loss and of the data; the prior is in the loss
    (`optperm.normal_prior`). By default noise is filled in until the steps are short enough, and nothing
    has to be chosen for an optimum less than some 25 units from the start in each parameter: the burn-in
    moves them by about .01 a step. With `fill=False` it is Mandt, Hoffman and Blei's method,
    :math:`\xi_t = 0`, right only where :math:`\lambda_{\max}(H A)` is well below 2. The factor
    :math:`1 - \mu` keeps the stationary distribution, to first order in the length of the steps, where
    it is without momentum.

    Draw batches with replacement. Within a shuffled epoch what one batch misses another one has, and
    their noise cancels: draws are then too narrow by a fifth and more, however many examples there are;
    a batch of all examples has no noise at all. From arrays `optperm.training.fit` draws them so.
    Nothing that scales the updates belongs behind the sampler, which would not see it: use
    `learning_rate`, whose shorter steps keep the law. Nothing that changes the noise of gradients, as
    `optperm.svrg` and clipping do, belongs in front:
    :math:`C` is that of the plain ones, and the state's `foreign` counts the others, of which there is
    a warning where the state is looked at. A loss has to be the mean of what each example loses, with
    weights as factors in it: one that sums, divides by the sum of weights or mixes examples, as
    BatchNorm does, has other noise, and the state's `uneven` counts it.

    The diagonal and the scalar preconditioner do not know how gradients are correlated: there variances
    are between about half and twice the right ones (features with a mean that is not zero are enough).
    The full one knows.

    Sampling begins near an optimum. Let an optimizer find one first, while :math:`C` is estimated along
    the way (`burn_in_optimizer`), or begin at params that are trained. On the way noise is larger than
    where the chain samples, and draws by that :math:`C` are too narrow: `optperm.posterior_report` warns
    of noise that was still falling when :math:`C` became constant. `optperm.draw_samples` collects
    the iterates of many chains, and `optperm.posterior_report` says whether they are to be trusted. An
    update outside of `jax.jit` raises if steps would diverge; in a compiled loop the state's `unstable`
    counts them. Params of 16 bits, which cannot hold such small steps, have a copy in float32 in the
    state.

    Args:
      num_data: N, the number of training examples.
      batch_size: S, the number of examples in a batch, of all replicas together.
      learning_rate: :math:`\eta`, a factor on all steps, a number or a schedule; 1 for sampling. With
        filled noise it multiplies `stability` and `rho` instead, which keeps the law.
      preconditioner: "scalar", "diagonal" or "full".
      estimator: "per_example", "single_example" or "two_batches".
      momentum: :math:`\mu`, in [0, 1). None for none; with filled noise for
        :math:`\min(.9, (S - 1) / (S + 1))`, by which steps are S times as long at the same `stability`.
      temperature: Factor on the posterior's covariance, a number or a schedule of the step.
      k_coef: Weight of new estimates of the noise.
      t0: Steps before that weight falls.
      burn_in: Steps before the first one that samples. None for 4,000 with filled noise, else 10.
      burn_in_optimizer: What moves the params meanwhile. None for `optax.adam(1e-2)` with filled noise,
        to which entries of a gradient that are not finite are zero; else they stay where they are, as
        they do with `optax.set_to_zero()`.
      freeze_after: Steps after which the noise is taken to be constant. None with filled noise for
        twice `burn_in`, at least 1,000 steps after it, else for never.
      estimate_after: Steps before the first estimate of the noise. None for half of `burn_in` with
        filled noise, when its optimizer should have settled, else for none.
      estimate_every: Steps from one estimate to the next. None for 1, but with filled noise,
        "per_example" and not the full preconditioner for half of S and a thousandth of the steps from
        the burn-in to `freeze_after`, whichever is less, at most 4.
      max_step: The largest step size, None for no limit.
      damping: The least noise, in the units of :math:`C`.
      fill: Whether noise is filled in; False for Mandt's method.
      stability: c, how long steps may be: with filled noise :math:`\lambda_{\max}(H A)` is c, times
        (1 + :math:`\mu`) / (1 - :math:`\mu`).
      rho: With filled noise, but for the full preconditioner, at least :math:`1 / \rho` of what there is
        is filled in.
      seed: Seed of the filled noise. `optperm.draw_samples` gives each chain noise of its own; chains of
        your own take states that were initialized with different seeds.
      chunk_size: How many gradients of examples to hold at once; None for all.
      max_full_size: The largest number of params for which the full preconditioner is built; None
        for 4096.
      axis_name: The mapped axis, or several, over which each batch is spread.

    Returns:
      A transformation. It needs `params`, the estimator's extra argument, and with filled noise
      `grad_fn`.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or steps would diverge; else as
        `optperm.scale_by_gradient_noise`.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (1000, 2))
      >>> y = x @ jnp.array([1.0, 2.0]) + jax.random.normal(jax.random.key(1), (1000,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2
      >>> tx = optperm.constant_sgd(1000, 10, burn_in=1000, burn_in_optimizer=optax.sgd(0.1))
      >>> def step(carry, key):
      ...     w, opt_state = carry
      ...     chosen = jax.random.choice(key, 1000, (10,))
      ...     e = optperm.evaluate(loss_fn, w, (x[chosen], y[chosen]))
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     w = optax.apply_updates(w, updates)
      ...     return (w, opt_state), w
      >>> start = jnp.zeros(2), tx.init(jnp.zeros(2))
      >>> _, draws = jax.lax.scan(step, start, jax.random.split(jax.random.key(2), 20_000))
      >>> exact = jnp.linalg.inv(x.T @ x)  # covariance of the posterior
      >>> bool(jnp.allclose(jnp.cov(draws[2000:].T), exact, atol=2e-4))
      True

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    examples = examples_of_an_estimate(estimator, preconditioner, batch_size)
    due = plan(burn_in, freeze_after, estimate_after, estimate_every, fill, examples)
    momentum_factor: Any = 1.0
    mean_factor: Any = 1.0
    if momentum is None and fill:
        momentum = _filled_momentum(batch_size)
    if momentum is not None:
        checks.check_in_range("momentum", momentum, 0.0, 1.0, may_be_schedule=False)
        momentum = _as_float(momentum)
        momentum_factor = 1.0 - momentum
        # With momentum steps diverge from lambda_max(H A) = 2 (1 + mu) on.
        mean_factor = momentum_factor / (1.0 + momentum)
    step_factor = _times(learning_rate, mean_factor)
    checks.check_positive("stability", stability)
    checks.check_positive("rho", rho)
    size, limits = _times(learning_rate, momentum_factor), (stability, rho)
    if fill:
        # Shorter steps are those of more noise that is filled in, whose law is the same.
        limits = tuple(_times(learning_rate, _as_float(number)) for number in limits)
        size = momentum_factor
    sampling = [
        scaled_by_noise(
            num_data,
            batch_size,
            due,
            preconditioner=preconditioner,
            estimator=estimator,
            temperature=temperature,
            k_coef=k_coef,
            t0=t0,
            max_step=max_step,
            damping=damping,
            stability=limits[0],
            rho=limits[1],
            seed=seed,
            chunk_size=chunk_size,
            max_full_size=max_full_size,
            axis_name=axis_name,
            step_factor=mean_factor if fill else step_factor,
        )
    ]
    if momentum is not None:
        sampling.append(optax.trace(momentum))
    sampler = optax.chain(*sampling, optax.scale_by_learning_rate(size))
    if burn_in_optimizer is None and fill:
        # A gradient that is not finite, which a sampling step leaves out, would stay in Adam's moments.
        finite = optax.stateless(lambda updates, _: zero_if_not_finite(updates))
        burn_in_optimizer = optax.chain(finite, optax.adam(1e-2))
    if burn_in_optimizer is None:
        return with_masters(optax.with_extra_args_support(sampler))
    checks.check_transformation("burn_in_optimizer", burn_in_optimizer)
    switched = switch_after(due.burn_in, burn_in_optimizer, sampler, track=True)
    return _watched(with_masters(switched))


def _watched(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """A sampler that says when it does not sample, though `switch_after` traces its steps."""

    def update(g: optax.Updates, state: Any, params: Any, **extra_args: Any) -> Any:
        updates, state = inner.update(g, state, params, **extra_args)
        for found in find_states(state, GradientNoiseState):
            warn_if_unstable(found)
        return updates, state

    return transformation(inner.init, update, method="constant_sgd", is_wrapper=True)


def _filled_momentum(batch_size: int | jax.Array) -> float | jax.Array:
    """By which c allows steps S times as long, as the batches' own curvatures vary S times less."""
    checks.check_count("batch_size", batch_size)
    if checks.is_concrete_number(batch_size):
        return min(0.9, (int(batch_size) - 1) / (int(batch_size) + 1))
    size = jnp.asarray(batch_size, jnp.float32)
    return jnp.minimum(0.9, (size - 1) / (size + 1))


def _times(
    learning_rate: optax.ScalarOrSchedule, factor: float | jax.Array
) -> optax.ScalarOrSchedule:
    if callable(learning_rate):
        return lambda count: (
            resolve_schedule("learning_rate", learning_rate, count)
            * jnp.asarray(factor, jnp.float32)
        )
    return _as_float(learning_rate) * factor


def _as_float(number: Any) -> Any:
    """A concrete number as one of Python, which takes on any dtype."""
    return float(number) if checks.is_concrete_number(number) else number
