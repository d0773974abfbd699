"""Preconditioning by the covariance of the gradient noise, so that constant SGD samples a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax

from optperm.bayes.noise_estimates import (
    ESTIMATES,
    NEEDS,
    OUTER,
    BatchGradients,
    Estimator,
    Preconditioner,
    product_with,
)
from optperm.bayes.noise_plan import Plan, examples_of_an_estimate, plan
from optperm.bayes.noise_state import (
    UNSTABLE,
    GradientNoiseState,
    initial_state,
    refilled,
    warn_if_unstable,
    with_curvature,
    with_estimate,
    with_factor,
    with_largest_noise,
    with_stability,
)
from optperm.bayes.normal_noise import fold, three_point_like
from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, cast_like
from optperm.contract.mapped_axes import AxisName, cond
from optperm.contract.schedules import resolve_schedule
from optperm.contract.states import find_state, mask_like
from optperm.contract.transformation import transformation

_MAX_FULL_SIZE = 4096
_CURVATURE = {"grad_fn": "the gradient of the batch at given params"}


def scale_by_gradient_noise(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    *,
    preconditioner: Preconditioner = "diagonal",
    estimator: Estimator = "per_example",
    temperature: optax.ScalarOrSchedule = 1.0,
    k_coef: float | jax.Array = 1.0,
    t0: float | jax.Array = 10.0,
    burn_in: int | jax.Array | None = None,
    freeze_after: int | jax.Array | None = None,
    estimate_after: int | jax.Array | None = None,
    estimate_every: int | jax.Array | None = None,
    max_step: float | jax.Array | None = None,
    damping: float | jax.Array = 0.0,
    fill: bool = False,
    stability: float | jax.Array = 0.2,
    rho: float | jax.Array = 1.0,
    seed: int | jax.Array = 0,
    chunk_size: int | None = None,
    max_full_size: int | None = None,
    axis_name: AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Multiplies gradients by the step sizes at which constant SGD samples from the posterior.

    With :math:`\ell_n(\theta) = -\log p(x_n | \theta) - \frac{1}{N} \log p(\theta)`, the loss
    :math:`L = \frac{1}{N} \sum_n \ell_n`, batches of :math:`S` examples, and :math:`C` the covariance of
    one example's gradient, the updates are :math:`H g` with

    .. math::
      H = \frac{2 S}{N} \frac{D}{\operatorname{tr} C} I \quad (\text{scalar}), \qquad
      H_{kk} = \frac{2 S}{N C_{kk}} \quad (\text{diagonal}), \qquad
      H = \frac{2 S}{N} C^{-1} \quad (\text{full})

    Of all matrices of its kind each brings the stationary distribution of
    :math:`\theta \leftarrow \theta - H g` closest to the posterior near an optimum,
    :math:`N(\theta^*, (N A)^{-1})` with :math:`A` the Hessian of :math:`L`; the full one makes them
    equal, up to the length of the steps. A diagonal :math:`H` is not always better than a scalar one.
    The temperature :math:`T` multiplies :math:`H`, and so the covariance of the posterior.

    :math:`C` is estimated along the way, by steps of :math:`\kappa_t = \min(1, k / (t_0 + t))`:

    .. math::
      C_t = C_{t-1} + \frac{\kappa_t}{w_t} (\hat C_t - C_{t-1}), \qquad
      w_t = w_{t-1} + \kappa_t (1 - w_{t-1}), \qquad w_{-1} = 0

    The weight :math:`w_t` removes the share of a start that means nothing, as in Adam: with
    :math:`k = 1` this is the plain mean of all estimates, with a greater one older estimates fade. With
    filled noise t begins anew where the burn-in ends, and after a quarter and a half of the steps from
    there to `freeze_after`; what was estimated before, on the way to the optimum, counts as
    :math:`t_0` estimates. A step uses the :math:`C` of the step before it. The estimators of
    :math:`\hat C_t`, all unbiased:

    - "per_example": the variance of the gradients of the batch's examples (S - 1 degrees of freedom),
      from the extra argument `per_example_grad_fn`;
    - "single_example": the squared difference of the gradients of the batch and of one example drawn
      apart from it, over 1 + 1/S, from `example_grad_fn` (`optperm.evaluate(..., example=...)`);
    - "two_batches": the squared difference of the gradients of the batch and of its first half, times
      S, from `grad_fn`; for losses whose examples cannot be told apart, such as with BatchNorm.

    With filled noise (`fill`), what is preconditioned is :math:`g + \xi`, and :math:`b \ge 0` limits the
    steps:

    .. math::
      H = \frac{2 S T}{N} (C + b I)^{-1}, \qquad E\, \xi \xi^\top = \frac{b}{S} I, \qquad
      b = \max\left(\frac{2 S T \lambda_{\max}(A)}{N c}, \frac{\lambda_{\max}(C)}{\rho}\right)

    The entries of :math:`\xi` are independent and take three values, :math:`0` and, with the probability
    1/6 each, :math:`\pm \sqrt{3 b / S}`. Their moments are those of a normal number to the fifth, so
    that on a quadratic the iterates have the first five cumulants that normal noise would give them, as
    in the weak schemes for stochastic differential equations (Kloeden and Platen, 1992); they take a
    seventh of the time. The noise of the batches is not normal either.

    The noise of :math:`g + \xi` has the covariance :math:`(C + b I) / S`, so that each step's is
    :math:`(2 T / N) H` whatever b is: nothing has to be cut off, and C need not be invertible. Without
    noise of the batches this is stochastic gradient Langevin dynamics; b = 0 is the method above. The
    full preconditioner does without the second bound, which a diagonal needs where it credits
    directions with noise that they lack. The eigenvalues are found by power iterations, that of
    :math:`A` by a Hessian-vector product in every tenth step until :math:`C` is constant, that of
    :math:`C` in every fourth of those. Without filled noise they tell :math:`\lambda_{\max}(H A)` in the
    burn-in, if `grad_fn` is passed: at 2 and more steps would diverge, and none is taken.

    All of them are made by `optperm.evaluate`. Estimates that are not finite are left out, and so are
    the steps of entries whose gradient is not. An entry without any noise takes a step of `max_step`;
    without that limit, none.

    Where the noise goes to zero, as it does in a network that fits its data, the step sizes go to
    infinity: there set `max_step`, near the largest learning rate at which plain SGD is stable.

    Args:
      num_data: N, the number of training examples.
      batch_size: S, the number of examples in a batch, of all replicas together.
      preconditioner: "scalar", "diagonal" or "full". The full one keeps two matrices of D x D, and makes
        two Cholesky decompositions a step until :math:`C` is constant.
      estimator: "per_example", "single_example" or "two_batches".
      temperature: T, a number or a schedule of the step.
      k_coef: k.
      t0: :math:`t_0`.
      burn_in: Steps that only estimate :math:`C`; their updates are zero. The very first step is one
        in any case, and the full preconditioner without filled noise waits for 2 D estimates. None for
        4,000 with filled noise, else 10.
      freeze_after: Steps after which :math:`C` is constant, as a stationary distribution needs it. None
        with filled noise for twice `burn_in`, at least 1,000 steps after it, else for never.
      estimate_after: Steps before the first estimate of :math:`C`. None for half of `burn_in` with
        filled noise, else for none.
      estimate_every: Steps from one estimate of :math:`C` to the next. None for 1, but with filled
        noise, "per_example" and not the full preconditioner for half of S and a thousandth of the steps
        from the burn-in to `freeze_after`, whichever is less, at most 4.
      max_step: The largest step size, for the eigenvalues of :math:`H`; None for no limit. With filled
        noise a bound on b, else larger eigenvalues are cut off, and the law with them.
      damping: The least noise: :math:`C_{kk}` is at least this large. With the full preconditioner it
        is added to the diagonal. With filled noise it is a bound on b.
      fill: Whether noise is filled in. It takes `grad_fn` too.
      stability: c, the largest eigenvalue of :math:`H A` with filled noise, in (0, 2).
      rho: :math:`\rho > 0`: the noise that is filled in is at least :math:`1 / \rho` of what there is.
      seed: Seed of the filled noise. The key is in the state.
      chunk_size: How many gradients "per_example" holds at once; None for all.
      max_full_size: The largest D for which the full preconditioner is built; None for 4096.
      axis_name: The mapped axis, or several, over which each batch is spread: the estimate is that of
        the whole batch, the same on all replicas. The gradients must be averaged already.

    Returns:
      A transformation whose state is a `GradientNoiseState`. It needs `params` and the estimator's
      extra argument.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, there are more examples in a batch than in the data,
        too many params for a full preconditioner, an extra argument is missing, or the trees passed to
        `update` do not match.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> data = 3.0 + jax.random.normal(jax.random.key(0), (1000,))
      >>> loss_fn = lambda mean, batch: jnp.mean((batch - mean) ** 2) / 2  # the posterior: N(3, 1/1000)
      >>> tx = optax.chain(optperm.scale_by_gradient_noise(1000, 10), optax.scale(-1.0))
      >>> def step(carry, key):
      ...     mean, opt_state = carry
      ...     e = optperm.evaluate(loss_fn, mean, jax.random.choice(key, data, (10,)))
      ...     updates, opt_state = tx.update(e.grad, opt_state, mean, **e.extra_args)
      ...     mean = optax.apply_updates(mean, updates)
      ...     return (mean, opt_state), mean
      >>> start = jnp.array(3.0), tx.init(jnp.array(3.0))
      >>> _, means = jax.lax.scan(step, start, jax.random.split(jax.random.key(1), 50_000))
      >>> bool(abs(1000 * jnp.var(means) - 1.0) < 0.2)
      True

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017
    """
    checks.check_positive("stability", stability)
    checks.check_positive("rho", rho)
    examples = examples_of_an_estimate(estimator, preconditioner, batch_size)
    return scaled_by_noise(
        num_data,
        batch_size,
        plan(burn_in, freeze_after, estimate_after, estimate_every, fill, examples),
        preconditioner=preconditioner,
        estimator=estimator,
        temperature=temperature,
        k_coef=k_coef,
        t0=t0,
        max_step=max_step,
        damping=damping,
        stability=stability,
        rho=rho,
        seed=seed,
        chunk_size=chunk_size,
        max_full_size=max_full_size,
        axis_name=axis_name,
    )


def scaled_by_noise(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    due: Plan,
    *,
    preconditioner: Preconditioner,
    estimator: Estimator,
    temperature: optax.ScalarOrSchedule,
    k_coef: float | jax.Array,
    t0: float | jax.Array,
    max_step: float | jax.Array | None,
    damping: float | jax.Array,
    stability: optax.ScalarOrSchedule,
    rho: optax.ScalarOrSchedule,
    seed: int | jax.Array,
    chunk_size: int | None,
    max_full_size: int | None,
    axis_name: AxisName | None,
    step_factor: optax.ScalarOrSchedule = 1.0,
) -> optax.GradientTransformationExtraArgs:
    """What `scale_by_gradient_noise` gives, by a plan, and by what its updates are multiplied later."""
    _check(dict(locals()))
    is_full, outer, fill = preconditioner == "full", OUTER[preconditioner], due.fill
    is_scheduled = fill and any(map(callable, (stability, step_factor)))

    def limits(count: jax.Array, params: optax.Params) -> dict[str, jax.Array]:
        dtype = accumulation_dtype(params)
        numbers = batch_size, num_data, damping, float("inf") if max_step is None else max_step
        s, n, least, largest_step = (jnp.asarray(number, dtype) for number in numbers)
        scale = 2 * (s / n) * resolve_schedule("temperature", temperature, count, dtype)
        return {"scale": scale, "damping": least, "max_step": largest_step}

    def init(params: optax.Params) -> GradientNoiseState:
        if is_full:
            _check_full_size(params, max_full_size)
        at_first = limits(jnp.zeros([], jnp.int32), params)
        return initial_state(params, outer, at_first, seed, is_full=is_full, fill=fill)

    def estimate(
        latest: GradientNoiseState, batch: BatchGradients, g: optax.Updates
    ) -> GradientNoiseState:
        # kappa_t = min(1, k / (t_0 + t))
        age = due.age(latest.count)
        kappa = jnp.minimum(1.0, jnp.float32(k_coef) / (jnp.float32(t0) + age.astype(jnp.float32)))
        return with_estimate(
            # Where the mean begins anew the older ones are no longer counted.
            latest._replace(
                estimates=jnp.minimum(latest.estimates, age),
                foreign=jnp.minimum(latest.foreign, age),
                uneven=jnp.minimum(latest.uneven, age),
            ),
            ESTIMATES[estimator](batch, outer),
            kappa,
            is_foreign=batch.differs_from(g),
        )

    def refill(latest: GradientNoiseState) -> GradientNoiseState:
        if not fill:
            return latest
        c, most, factor = (
            resolve_schedule("learning_rate", number, latest.count, latest.scale.dtype)
            for number in (stability, rho, step_factor)
        )
        return refilled(latest, c / factor, None if is_full else most, factor)

    def factorize(latest: GradientNoiseState, batch: BatchGradients) -> GradientNoiseState:
        examples = batch_size - 1 if estimator == "per_example" else batch.replicas
        is_enough = latest.estimates * examples >= 2 * len(latest.covariance)
        is_enough |= (latest.damping > 0) | fill
        return with_factor(refill(latest), is_enough, is_limited=max_step is not None and not fill)

    def probe(latest: GradientNoiseState, batch: BatchGradients) -> GradientNoiseState:
        taken = due.probes_before(latest.count)
        if fill:
            latest = cond(
                due.probes_noise(latest.count),
                lambda: with_largest_noise(
                    latest,
                    ESTIMATES[estimator](batch, product_with(latest.noise_direction))[0],
                    due.probes_of_noise_before(latest.count),
                    due.is_frozen(latest.count),
                ),
                lambda: latest,
            )
            return cond(
                due.is_frozen(latest.count),
                lambda: latest,
                lambda: with_curvature(latest, batch.curvature_product, taken),
            )
        factor = resolve_schedule(
            "learning_rate", step_factor, latest.count, latest.stability.dtype
        )
        return with_stability(latest, batch.curvature_product, taken, factor)

    def update(
        g: optax.Updates, state: GradientNoiseState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, GradientNoiseState]:
        if not jax.tree.leaves(params):  # an empty part of optax.partition
            return g, state._replace(count=optax.safe_increment(state.count))
        now = state._replace(**limits(state.count, params))
        grad = extra_args.get("grad")
        grad = g if grad is None else mask_like(grad, params)
        batch = BatchGradients(params, grad, extra_args, batch_size, chunk_size, axis_name)

        # H_t (g_t + xi_t), xi_t ~ N(0, b_t / S), by the C and the b of the step before
        noisy = _with_noise(g, now, batch_size) if fill else g
        h_g = cast_like(now.preconditioned(noisy), params)
        is_due = (now.count >= due.burn_in) & (now.weight > 0) & now.is_ready()
        is_moving = is_due & (now.stability < UNSTABLE)
        new_updates = jax.tree.map(
            lambda x: jnp.where(is_moving & jnp.isfinite(x), x, jnp.zeros_like(x)), h_g
        )

        # C_t, with C^_t in it
        following = cond(due.estimates(now.count), lambda: estimate(now, batch, g), lambda: now)

        # L_t L_t^T = C_t + b_t I, where H_{t+1} = 2 S T / N (C_t + b_t I)^{-1} takes it
        if is_full:
            is_stale = (
                due.factorizes(now.count)
                | (now.scale != state.scale)
                | (is_scheduled and refill(following).filling != following.filling)
            )
            following = cond(
                is_stale, lambda latest: factorize(latest, batch), lambda same: same, following
            )

        # lambda_max(A), or without filled noise lambda_max(H A)
        if extra_args.get("grad_fn") is not None:
            is_due_to = due.probes(now.count)
            following = cond(
                is_due_to, lambda latest: probe(latest, batch), lambda same: same, following
            )
        following = following if is_full else refill(following)
        following = following._replace(
            count=optax.safe_increment(state.count),
            steps=now.steps + is_moving.astype(jnp.int32),
            unstable=now.unstable + (is_due & ~is_moving).astype(jnp.int32),
        )
        warn_if_unstable(following)
        return new_updates, following

    return transformation(
        init,
        update,
        method="scale_by_gradient_noise",
        like=(lambda state: state.covariance) if preconditioner == "diagonal" else None,
        dtypes=False,
        needs=NEEDS[estimator] | (_CURVATURE if fill else {}),
        axis_name=axis_name,
    )


def _with_noise(
    g: optax.Updates, state: GradientNoiseState, batch_size: int | jax.Array
) -> optax.Updates:
    """The gradient, and noise of the covariance b / S."""
    data = fold(state.key, state.count)
    deviation = jnp.sqrt(state.filling / jnp.asarray(batch_size, state.filling.dtype))
    return jax.tree.map(
        lambda g, xi: g.astype(xi.dtype) + deviation.astype(xi.dtype) * xi,
        g,
        three_point_like(data, g),
    )


def noise_covariance(opt_state: Any) -> Any:
    """The covariance of one example's gradient, as `optperm.scale_by_gradient_noise` has estimated it.

    Args:
      opt_state: The state of an optimizer with `optperm.scale_by_gradient_noise` or
        `optperm.constant_sgd` in it, in any nesting.

    Returns:
      What the preconditioner needs. For "scalar" the mean of the diagonal, (); for "diagonal" the
      diagonal, a tree like params; for "full" a matrix (D, D), of the params in the order of
      `jax.flatten_util.ravel_pytree`. Zero before the first step.

    Raises:
      ValueError: If there is no such state, or more than one.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> tx = optperm.scale_by_gradient_noise(num_data=100, batch_size=4)
      >>> w = jnp.array([0.0, 0.0])
      >>> grads = jnp.array([[1.0, 0.0], [3.0, 0.0], [1.0, 2.0], [3.0, 2.0]])
      >>> extras = {"per_example_grad_fn": lambda w: grads}
      >>> _, opt_state = tx.update(grads.mean(0), tx.init(w), w, **extras)
      >>> [round(float(c), 4) for c in optperm.noise_covariance(opt_state)]
      [1.3333, 1.3333]
    """
    return find_state(opt_state, GradientNoiseState, method="scale_by_gradient_noise").covariance


def _check_full_size(params: optax.Params, max_full_size: int | None) -> None:
    size = sum(jnp.size(leaf) for leaf in jax.tree.leaves(params))
    largest = _MAX_FULL_SIZE if max_full_size is None else max_full_size
    if size > largest:
        raise ValueError(
            f"The full preconditioner of {size} params is a matrix of {size} x {size}; at most "
            f"max_full_size={largest} are allowed. Use preconditioner='diagonal', or raise "
            "max_full_size if that fits into memory."
        )


def _check(given: dict[str, Any]) -> None:
    """Raises what `scale_by_gradient_noise` says about arguments that can be judged by themselves."""
    checks.check_choice("preconditioner", given["preconditioner"], tuple(OUTER))
    if given["due"].fill and checks.is_concrete_number(given["stability"]):
        _check_stability(float(given["stability"]))
    checks.check_choice("estimator", given["estimator"], tuple(ESTIMATES))
    _check_data(given["num_data"], given["batch_size"])
    checks.check_in_range("temperature", given["temperature"], 0.0, float("inf"))
    checks.check_positive("k_coef", given["k_coef"])
    for name in ("t0", "damping"):
        checks.check_in_range(name, given[name], 0.0, float("inf"), may_be_schedule=False)
    if given["max_step"] is not None:
        checks.check_positive("max_step", given["max_step"])
    checks.check_seed("seed", given["seed"])
    for name in ("chunk_size", "max_full_size"):
        if given[name] is not None:
            checks.check_static_count(name, given[name])
    checks.check_axis_name("axis_name", given["axis_name"])


def _check_stability(stability: float) -> None:
    if stability >= UNSTABLE:
        raise ValueError(
            "stability times learning_rate must be below 2, from where on steps diverge, got "
            f"{stability:g}. Lower them: the defaults are 0.2 and 1."
        )


def _check_data(num_data: object, batch_size: object) -> None:
    checks.check_count("num_data", num_data)
    checks.check_count("batch_size", batch_size)
    if not (checks.is_concrete_number(num_data) and checks.is_concrete_number(batch_size)):
        return
    if int(num_data) < int(batch_size):
        raise ValueError(
            f"num_data must be at least batch_size, got {num_data} examples in all and "
            f"{batch_size} in a batch. num_data comes first."
        )
    if int(num_data) == int(batch_size) > 1:
        warnings.warn(
            f"batch_size is num_data, {num_data}: the gradient of all examples has no noise, whatever "
            "their own gradients tell, and then the draws are too narrow. Draw small batches with "
            "replacement, or sample with sgld or sghmc, whose noise is their own.",
            stacklevel=4,
        )
