"""Preconditioning by the covariance of the gradient noise, so that constant SGD samples a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from optperm.bayes.noise_estimates import (
    ESTIMATES,
    NEEDS,
    OUTER,
    BatchGradients,
    Estimator,
    Preconditioner,
)
from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.mapped_axes import AxisName, cond, mark_varying, varying_axes
from optperm.contract.schedules import resolve_schedule
from optperm.contract.shardings import unshard
from optperm.contract.states import find_state, mask_like
from optperm.contract.transformation import transformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree

_MAX_FULL_SIZE = 4096


class GradientNoiseState(NamedTuple):
    r"""State of `scale_by_gradient_noise`.

    Attributes:
      count: Steps taken.
      weight: :math:`w`, the weight of all estimates so far: 0 before the first, then towards 1.
      covariance: :math:`C`, as much of it as the preconditioner needs: the mean of its diagonal, the
        diagonal as a tree like params, or all of it; in float32 or the params' dtype if wider.
      factor: With the full preconditioner, the Cholesky factor of what is inverted; zero as long as
        there is none. Else an empty tuple.
      scale: :math:`2 S T / N`, as of the last step.
      damping: The least noise, in the units of :math:`C`.
      max_step: The largest step size; infinite for no limit.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    weight: Float32[Array, ""]
    covariance: Float[Array, ""] | Float[Array, "d d"] | PyTree[Float[Array, "?*shape"], "Params"]
    factor: PyTree[Float[Array, "d d"]]
    scale: Float[Array, ""]
    damping: Float[Array, ""]
    max_step: Float[Array, ""]

    def preconditioned(self, grads: optax.Updates) -> optax.Updates:
        """H g, in the dtypes of g.

        Args:
          grads: g, a tree like the params; the diagonal preconditioner leaves out itself what it does
            not see under `optax.masked` or `optax.partition`, the others cannot.
        """
        if not isinstance(self.factor, tuple):
            moves = self._solve(grads)
        elif _is_number(self.covariance):
            h = self._step_size(self.covariance)
            moves = jax.tree.map(lambda g: h * jnp.asarray(g, h.dtype), grads)
        else:
            grads = mask_like(grads, self.covariance)
            steps = jax.tree.map(self._step_size, self.covariance)
            moves = jax.tree.map(lambda h, g: h * jnp.asarray(g, h.dtype), steps, grads)
        return cast_like(moves, grads)

    def _step_size(self, covariance: jax.Array) -> jax.Array:
        """Of entries with this noise; without any noise and without a limit there is no step."""
        scale, damping, limit = (
            jnp.asarray(x, covariance.dtype) for x in (self.scale, self.damping, self.max_step)
        )
        step = jnp.minimum(scale / jnp.maximum(covariance, damping), limit)
        return jnp.where(jnp.isfinite(step), step, jnp.zeros_like(step))

    def _solve(self, grads: optax.Updates) -> optax.Updates:
        grads = jax.tree.map(lambda g: jnp.asarray(g, self.factor.dtype), unshard(grads))
        flat, unflatten = ravel_pytree(grads)
        _check_size(flat.size, self.factor)
        solution = jax.scipy.linalg.cho_solve((self.factor, True), flat)
        step = self.scale * solution
        return unflatten(jnp.where(self._has_factor(), step, jnp.zeros_like(step)))

    def _has_factor(self) -> jax.Array:
        return jnp.all(jnp.diagonal(self.factor) > 0)


def scale_by_gradient_noise(
    num_data: int | jax.Array,
    batch_size: int | jax.Array,
    *,
    preconditioner: Preconditioner = "diagonal",
    estimator: Estimator = "per_example",
    temperature: optax.ScalarOrSchedule = 1.0,
    k_coef: float | jax.Array = 1.0,
    t0: float | jax.Array = 10.0,
    burn_in: int | jax.Array = 10,
    freeze_after: int | jax.Array | None = None,
    max_step: float | jax.Array | None = None,
    damping: float | jax.Array = 0.0,
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
    :math:`k = 1` this is the plain mean of all estimates, with a greater one older estimates fade. A
    step uses the :math:`C` of the step before it. The estimators of :math:`\hat C_t`, all unbiased:

    - "per_example": the variance of the gradients of the batch's examples (S - 1 degrees of freedom),
      from the extra argument `per_example_grad_fn`;
    - "single_example": the squared difference of the gradients of the batch and of one example drawn
      apart from it, over 1 + 1/S, from `example_grad_fn` (`optperm.evaluate(..., example=...)`);
    - "two_batches": the squared difference of the gradients of the batch and of its first half, times
      S, from `grad_fn`; for losses whose examples cannot be told apart, such as with BatchNorm.

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
        in any case.
      freeze_after: Steps after which :math:`C` is constant, as a stationary distribution needs it; None
        for never.
      max_step: The largest step size, for the eigenvalues of :math:`H`; None for no limit. Where it
        binds, the full preconditioner is made smaller in all directions, by
        :math:`2 S T / (N \text{max\_step})` added to the diagonal of :math:`C`.
      damping: The least noise: :math:`C_{kk}` is at least this large. With the full preconditioner it
        is added to the diagonal.
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
    checks.check_choice("preconditioner", preconditioner, tuple(OUTER))
    checks.check_choice("estimator", estimator, tuple(ESTIMATES))
    _check_data(num_data, batch_size)
    _check_steps(temperature, k_coef, t0, burn_in, freeze_after, max_step, damping)
    if chunk_size is not None:
        checks.check_static_count("chunk_size", chunk_size)
    largest = _MAX_FULL_SIZE if max_full_size is None else max_full_size
    checks.check_static_count("max_full_size", largest)
    checks.check_axis_name("axis_name", axis_name)

    is_full, outer = preconditioner == "full", OUTER[preconditioner]

    def limits(count: jax.Array, params: optax.Params) -> dict[str, jax.Array]:
        dtype = accumulation_dtype(params)
        share = jnp.asarray(batch_size, dtype) / jnp.asarray(num_data, dtype)
        return {
            "scale": 2 * share * resolve_schedule("temperature", temperature, count, dtype),
            "damping": jnp.asarray(damping, dtype),
            "max_step": jnp.asarray(float("inf") if max_step is None else max_step, dtype),
        }

    def init(params: optax.Params) -> GradientNoiseState:
        size = sum(jnp.size(leaf) for leaf in jax.tree.leaves(params))
        if is_full and size > largest:
            raise ValueError(
                f"The full preconditioner of {size} params is a matrix of {size} x {size}; at most "
                f"max_full_size={largest} are allowed. Use preconditioner='diagonal', or raise "
                "max_full_size if that fits into memory."
            )
        covariance = outer(
            jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
        )
        count = jnp.zeros([], jnp.int32)
        return GradientNoiseState(
            count=count,
            weight=mark_varying(jnp.zeros([], jnp.float32), varying_axes(params)),
            covariance=covariance,
            factor=jnp.zeros_like(covariance) if is_full else (),
            **limits(count, params),
        )

    def update(
        g: optax.Updates, state: GradientNoiseState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, GradientNoiseState]:
        if not jax.tree.leaves(params):  # an empty part of optax.partition
            return g, state._replace(count=optax.safe_increment(state.count))

        # H_t g_t, by the C of the step before
        now = state._replace(**limits(state.count, params))
        is_moving = (now.count >= burn_in) & (now.weight > 0)
        h_g = cast_like(now.preconditioned(g), params)
        new_updates = jax.tree.map(
            lambda x: jnp.where(is_moving & jnp.isfinite(x), x, jnp.zeros_like(x)), h_g
        )

        # kappa_t = min(1, k / (t_0 + t)), and C_t with C^_t in it
        grad = extra_args.get("grad")
        grad = g if grad is None else mask_like(grad, params)
        batch = BatchGradients(params, grad, extra_args, batch_size, chunk_size, axis_name)

        def estimate() -> GradientNoiseState:
            t = now.count.astype(jnp.float32)
            kappa = jnp.minimum(1.0, jnp.float32(k_coef) / (jnp.float32(t0) + t))
            return _with_estimate(now, ESTIMATES[estimator](batch, outer), kappa)

        if freeze_after is None:
            is_estimating, following = jnp.ones([], bool), estimate()
        else:
            is_estimating = now.count < freeze_after
            following = cond(is_estimating, estimate, lambda: now)

        # L_t L_t^T = C_t, where H_{t+1} = 2 S T / N C_t^{-1} takes it
        if is_full:
            is_stale = is_estimating | (now.scale != state.scale)
            is_needed = is_stale & (now.count + 1 >= burn_in)
            following = cond(is_needed, _with_factor, lambda latest: latest, following)
        return new_updates, following._replace(count=optax.safe_increment(state.count))

    return transformation(
        init,
        update,
        method="scale_by_gradient_noise",
        like=(lambda state: state.covariance) if preconditioner == "diagonal" else None,
        dtypes=False,
        needs=NEEDS[estimator],
        axis_name=axis_name,
    )


def _with_estimate(state: GradientNoiseState, sample: Any, kappa: jax.Array) -> GradientNoiseState:
    """The state with one more estimate of the covariance, if it is finite."""
    is_sound = all_finite(sample)

    # w_t = w_{t-1} + kappa_t (1 - w_{t-1})
    weight = state.weight + kappa * (1 - state.weight)
    rate = jnp.where(weight > 0, kappa / weight, 0.0)

    # C_t = C_{t-1} + kappa_t / w_t (C^_t - C_{t-1})
    def towards(old: jax.Array, new: jax.Array) -> jax.Array:
        # In this form a rate of 1 gives the new one, bit for bit.
        mixed = (1 - rate).astype(old.dtype) * old + rate.astype(old.dtype) * new
        return jnp.where(is_sound, mixed, old)

    return state._replace(
        weight=jnp.where(is_sound, weight, state.weight),
        covariance=jax.tree.map(towards, state.covariance, sample),
    )


def _with_factor(state: GradientNoiseState) -> GradientNoiseState:
    """The state with the factor for the next step, if there is one."""
    identity = jnp.identity(len(state.covariance), dtype=state.covariance.dtype)
    damped = state.covariance + state.damping * identity
    # All eigenvalues of H are at most max_step if those of C are at least this.
    floor = state.scale / state.max_step
    is_within = jnp.all(jnp.isfinite(jnp.linalg.cholesky(damped - floor * identity)))
    factor = jnp.linalg.cholesky(jnp.where(is_within, damped, damped + floor * identity))
    is_sound = jnp.all(jnp.isfinite(factor)) & (state.weight > 0)
    return state._replace(factor=jnp.where(is_sound, factor, state.factor))


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


def _check_size(size: int, factor: jax.Array) -> None:
    if size != len(factor):
        raise ValueError(
            f"The optimizer state was made for {len(factor)} params, but there are {size} here."
        )


def _is_number(tree: Any) -> bool:
    return jax.tree_util.all_leaves([tree]) and jnp.ndim(tree) == 0


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


def _check_steps(
    temperature: object,
    k_coef: object,
    t0: object,
    burn_in: object,
    freeze_after: object,
    max_step: object,
    damping: object,
) -> None:
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    checks.check_positive("k_coef", k_coef)
    checks.check_in_range("t0", t0, 0.0, float("inf"), may_be_schedule=False)
    checks.check_count("burn_in", burn_in, minimum=0)
    if freeze_after is not None:
        checks.check_count("freeze_after", freeze_after)
    if max_step is not None:
        checks.check_positive("max_step", max_step)
    checks.check_in_range("damping", damping, 0.0, float("inf"), may_be_schedule=False)
