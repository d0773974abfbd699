"""Stochastic gradient Langevin dynamics, without and with momentum.

M. Welling and Y. W. Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011;
T. Chen, E. B. Fox and C. Guestrin, "Stochastic Gradient Hamiltonian Monte Carlo", ICML 2014.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes._faults import judge_temperature
from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.dtypes import (
    accumulation_dtype,
    all_finite,
    computed_once,
    wide_zeros,
    zero_if_not_finite,
)
from optperm.core.keys import key_data
from optperm.core.noise import fold, normal_like
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import shard_like
from optperm.core.states import ForLoop
from optperm.core.transformation import transformation
from optperm.core.trees import mask_like, without_variables


class SgldState(NamedTuple):
    r"""State of `sgld`.

    Attributes:
      count: Number of steps taken.
      key: The raw random key of the noise.
      step_size: :math:`\epsilon` of the last step; 0 with a preconditioner.
      temperature: T of the last step.
      num_data: N.
      left_out: Number of steps that left out entries with a nonfinite gradient.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    step_size: Float32[Array, ""]
    temperature: Float32[Array, ""]
    num_data: Int32[Array, ""]
    left_out: Int32[Array, ""]

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement, and the number of training examples."""
        return ForLoop(draws_examples=True, num_data=self.num_data)

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Return the step size and the temperature of the last step."""
        return self.step_size, self.temperature

    def warnings(self, params: Any = None) -> list[str]:
        """Return a sentence if the last step had no noise, as far as Python can see.

        Args:
          params: Not used.
        """
        del params
        return judge_temperature(self.count, self.temperature)

    def reach(self, step_size: Any, temperature: Any) -> Any:
        r"""Return :math:`r = \epsilon T / 2`, for the increase of a variance by the steps.

        The variance :math:`V_0` of the posterior becomes :math:`V_0 / (1 - r / (2 V_0))`, where
        :math:`r / V_0` is the step times the curvature.

        Args:
          step_size: The step size.
          temperature: T.
        """
        return step_size * temperature / 2

    def gain(self, step_size: Any, temperature: Any) -> Any:
        r"""Return :math:`\epsilon N^2 / (4 T)`, the inverse of the injected noise's variance.

        The product with the variance of a batch's gradient is the fraction by which the noise of the
        batches increases a variance.

        Args:
          step_size: The step size.
          temperature: T.
        """
        return step_size * float(np.max(self.num_data)) ** 2 / (4 * temperature)


class SghmcState(NamedTuple):
    r"""State of `sghmc`.

    Attributes:
      count: Number of steps taken.
      velocity: :math:`v`, a tree like params, in float32 or wider.
      key: The raw random key of the noise.
      step_size: :math:`\eta` of the last step.
      temperature: T of the last step.
      friction: :math:`\alpha`.
      num_data: N.
      left_out: Number of steps that left out entries with a nonfinite gradient.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    velocity: PyTree[Float[Array, "?*shape"], "Params"]
    key: UInt32[Array, "2"]
    step_size: Float32[Array, ""]
    temperature: Float32[Array, ""]
    friction: Float32[Array, ""]
    num_data: Int32[Array, ""]
    left_out: Int32[Array, ""]

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement, and the number of training examples."""
        return ForLoop(draws_examples=True, num_data=self.num_data)

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Return the step size and the temperature of the last step."""
        return self.step_size, self.temperature

    def warnings(self, params: Any = None) -> list[str]:
        """Return a sentence if the last step had no noise, as far as Python can see.

        Args:
          params: Not used.
        """
        del params
        return judge_temperature(self.count, self.temperature)

    def reach(self, step_size: Any, temperature: Any) -> Any:
        r"""Return :math:`r = \eta T / (2 - \alpha)`, as for `SgldState`.

        With :math:`b = \eta T / V_0`, the params follow
        :math:`\theta_{t+1} = (2 - \alpha - b) \theta_t - (1 - \alpha) \theta_{t-1} + \sigma \xi`, whose
        variance is :math:`\sigma^2 (2 - \alpha) / (\alpha b (2 (2 - \alpha) - b))`, which is
        :math:`V_0 / (1 - r / (2 V_0))` for :math:`\sigma^2 = 2 \alpha \eta T`.

        Args:
          step_size: The step size.
          temperature: T.
        """
        return step_size * temperature / (2 - float(np.max(self.friction)))

    def gain(self, step_size: Any, temperature: Any) -> Any:
        r"""Return :math:`\eta N^2 / (2 \alpha T)`, as for `SgldState`.

        Args:
          step_size: The step size.
          temperature: T.
        """
        n, alpha = (float(np.max(x)) for x in (self.num_data, self.friction))
        return step_size * n**2 / (2 * alpha * temperature)


def sgld(
    step_size: optax.ScalarOrSchedule,
    num_data: int | jax.Array,
    temperature: optax.ScalarOrSchedule = 1.0,
    preconditioner: Params | None = None,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sample with stochastic gradient Langevin dynamics: half a gradient step plus noise.

    .. math::
      \theta_{t+1} = \theta_t - \frac{\epsilon}{2} N M g_t + \sqrt{\epsilon T} M^{1/2} \xi_t,
      \qquad \xi_t \sim N(0, I)

    where :math:`g_t` is the gradient of the mean loss over a batch; the loss includes the prior
    (`optperm.bayes.normal_prior`). The distribution of the iterates tends to the posterior as
    :math:`\epsilon \to 0`. The noise of :math:`g_t`, with covariance :math:`R`, increases variances by
    the fraction :math:`\epsilon N^2 M R / (4 T)`.

    Args:
      step_size: :math:`\epsilon`, a number or a schedule of the step.
      num_data: N, the number of training examples.
      temperature: T, a number or a schedule of the step.
      preconditioner: The diagonal of :math:`M`, a tree like params of positive numbers; None for ones.
        With a preconditioner, `optperm.bayes.posterior_report` does not check the increases of
        variances by steps and batches.
      key: A random key of the noise, or an int. The state contains the key.

    Returns:
      A transformation whose state is an `SgldState`, with the remainders of 16-bit params.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.sgld(1e-4, num_data=1000)  # for the posterior N(3, 1/1000)
      >>> def step(carry, _):
      ...     mean, opt_state = carry
      ...     updates, opt_state = tx.update(mean - 3.0, opt_state, mean)
      ...     mean = optax.apply_updates(mean, updates)
      ...     return (mean, opt_state), mean
      >>> start = jnp.array(3.0), tx.init(jnp.array(3.0))
      >>> _, means = jax.lax.scan(step, start, length=50_000)
      >>> bool(abs(1000 * jnp.var(means) - 1.0) < 0.2)
      True

    Notes:
      With `optperm.svrg` before this transformation, :math:`R` is small near a snapshot (the control
      variates of Baker et al.). Do not put clipping, momentum or Adam's moments before it, because they
      also change the mean of the gradients. Do not scale the updates after it, because this changes the
      temperature. Each chain needs its own noise: `optperm.bayes.draw_samples` provides it; for your
      own chains, initialize states with different keys.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, or the preconditioner does not match the params.

    References:
      Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, ICML 2011
    """
    _check(step_size, num_data, temperature, key)
    if preconditioner is not None:
        for leaf in jax.tree.leaves(preconditioner):
            if not isinstance(leaf, jax.core.Tracer) and not np.all(np.asarray(leaf) > 0):
                raise ValueError(
                    f"preconditioner must be above 0 in every entry, got {np.min(leaf)}."
                )

    def scales(params: Params) -> Any:
        """Return M, without the parts that are masked in the params."""
        return mask_like(without_variables(preconditioner), params)

    def init(params: Params) -> SgldState:
        if preconditioner is not None:
            checks.check_same_tree(
                "preconditioner", scales(params), params, source="params", dtypes=False
            )
        return SgldState(
            count=jnp.zeros([], jnp.int32),
            key=key_data(key),
            step_size=jnp.zeros([], jnp.float32),
            temperature=jnp.zeros([], jnp.float32),
            num_data=jnp.asarray(num_data, jnp.int32),
            left_out=jnp.zeros([], jnp.int32),
        )

    def update(g: Updates, state: SgldState, params: Params, **_: Any) -> tuple[Updates, SgldState]:
        dtype = accumulation_dtype(params)
        epsilon = resolve_schedule("step_size", step_size, state.count, dtype)
        t = resolve_schedule("temperature", temperature, state.count, dtype)
        n = jnp.asarray(num_data, dtype)
        xi = normal_like(fold(state.key, state.count), params)
        # Without a barrier, XLA fuses the noise into the product that makes g, and compiles for a minute
        noisy = jax.lax.optimization_barrier(g)
        m = optax.tree.ones_like(xi) if preconditioner is None else scales(params)

        # u = -epsilon / 2 N M g + sqrt(epsilon T) M^(1/2) xi
        def move(g: jax.Array, xi: jax.Array, m: jax.Array) -> jax.Array:
            m = shard_like(jnp.asarray(m, xi.dtype), xi)
            drift = (epsilon / 2 * n).astype(xi.dtype) * m * g.astype(xi.dtype)
            return jnp.sqrt(epsilon * t).astype(xi.dtype) * jnp.sqrt(m) * xi - drift

        moves = computed_once(jax.tree.map(move, noisy, xi, m))
        # A report judges the steps only for M = 1
        is_plain = float(preconditioner is None)
        return zero_if_not_finite(moves), state._replace(
            count=optax.safe_increment(state.count),
            step_size=(is_plain * epsilon).astype(jnp.float32),
            temperature=t.astype(jnp.float32),
            num_data=jnp.asarray(num_data, jnp.int32),
            left_out=state.left_out + jnp.logical_not(all_finite(moves)).astype(jnp.int32),
        )

    return with_remainders(
        transformation(init, update, method="sgld", takes_gradient=True),
        method="sgld",
    )


def sghmc(
    step_size: optax.ScalarOrSchedule,
    num_data: int | jax.Array,
    friction: float | jax.Array,
    temperature: optax.ScalarOrSchedule = 1.0,
    noise_estimate: float | jax.Array = 0.0,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sample with stochastic gradient Hamiltonian Monte Carlo: momentum, friction and noise.

    .. math::
      v_{t+1} = (1 - \alpha) v_t - \eta N g_t + \sqrt{2 (\alpha - \hat\beta) \eta T} \, \xi_t, \qquad
      \theta_{t+1} = \theta_t + v_{t+1}, \qquad \xi_t \sim N(0, I)

    This is equation 15 of Chen et al., where :math:`g_t` is the gradient of the mean loss over a batch;
    the loss includes the prior (`optperm.bayes.normal_prior`). :math:`\hat\beta = \eta N^2 R / 2` is
    the part of the friction that balances the noise of :math:`g_t`, with covariance :math:`R`.

    Args:
      step_size: :math:`\eta`, a number or a schedule of the step: the square of the leapfrog step.
      num_data: N, the number of training examples.
      friction: :math:`\alpha`, in (0, 1]: 1 minus the decay rate of the momentum. Without friction,
        there is no stationary distribution.
      temperature: T, a number or a schedule of the step.
      noise_estimate: :math:`\hat\beta`, at most `friction`.
      key: A random key of the noise, or an int. The state contains the key.

    Returns:
      A transformation whose state is an `SghmcState`, with the remainders of 16-bit params.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> tx = optperm.sghmc(1e-5, num_data=1000, friction=0.1)  # for the posterior N(3, 1/1000)
      >>> def step(carry, _):
      ...     mean, opt_state = carry
      ...     updates, opt_state = tx.update(mean - 3.0, opt_state, mean)
      ...     mean = optax.apply_updates(mean, updates)
      ...     return (mean, opt_state), mean
      >>> start = jnp.array(3.0), tx.init(jnp.array(3.0))
      >>> _, means = jax.lax.scan(step, start, length=50_000)
      >>> bool(abs(1000 * jnp.var(means) - 1.0) < 0.2)
      True

    Notes:
      Each chain needs its own noise: `optperm.bayes.draw_samples` provides it; for your own chains,
      initialize states with different keys.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range.

    References:
      Chen, Fox and Guestrin, `Stochastic Gradient Hamiltonian Monte Carlo
      <https://arxiv.org/abs/1402.4102>`_, ICML 2014
    """
    _check(step_size, num_data, temperature, key)
    checks.check_positive("friction", friction, 1.0)
    checks.check_decay("1 - friction, the decay of the momentum,", 1 - friction)
    most = float(friction) if checks.is_concrete_number(friction) else 1.0
    checks.check_in_range("noise_estimate", noise_estimate, 0.0, most, may_be_schedule=False)
    numbers = friction, noise_estimate

    def init(params: Params) -> SghmcState:
        return SghmcState(
            count=jnp.zeros([], jnp.int32),
            velocity=wide_zeros(params),
            key=key_data(key),
            step_size=jnp.zeros([], jnp.float32),
            temperature=jnp.zeros([], jnp.float32),
            friction=jnp.asarray(friction, jnp.float32),
            num_data=jnp.asarray(num_data, jnp.int32),
            left_out=jnp.zeros([], jnp.int32),
        )

    def update(
        g: Updates, state: SghmcState, params: Params, **_: Any
    ) -> tuple[Updates, SghmcState]:
        dtype = accumulation_dtype(params)
        eta = resolve_schedule("step_size", step_size, state.count, dtype)
        t = resolve_schedule("temperature", temperature, state.count, dtype)
        alpha, beta = (jnp.asarray(number, dtype) for number in numbers)
        n = jnp.asarray(num_data, dtype)
        drift = eta * n
        deviation = jnp.sqrt(2 * (alpha - beta) * eta * t)
        xi = normal_like(fold(state.key, state.count), params)

        # v' = (1 - alpha) v - eta N g + sqrt(2 (alpha - beta) eta T) xi, u = v'
        def next_velocity(v: jax.Array, g: jax.Array, xi: jax.Array) -> jax.Array:
            kept = (1 - alpha).astype(v.dtype) * v + deviation.astype(v.dtype) * xi
            return kept - drift.astype(v.dtype) * g.astype(v.dtype)

        # The barrier has the same reason as in sgld
        noisy = jax.lax.optimization_barrier(g)
        velocity = computed_once(jax.tree.map(next_velocity, state.velocity, noisy, xi))
        is_left_out = jnp.logical_not(all_finite(velocity))
        u = zero_if_not_finite(velocity)
        velocity = jax.tree.map(
            lambda v, old: jnp.where(jnp.isfinite(v), v, old), velocity, state.velocity
        )
        return u, SghmcState(
            count=optax.safe_increment(state.count),
            velocity=velocity,
            key=state.key,
            step_size=eta.astype(jnp.float32),
            temperature=t.astype(jnp.float32),
            friction=alpha.astype(jnp.float32),
            num_data=jnp.asarray(num_data, jnp.int32),
            left_out=state.left_out + is_left_out.astype(jnp.int32),
        )

    return with_remainders(
        transformation(
            init,
            update,
            method="sghmc",
            like=lambda state: state.velocity,
            takes_gradient=True,
        ),
        method="sghmc",
    )


def _check(step_size: object, num_data: object, temperature: object, key: object) -> None:
    checks.check_in_range("step_size", step_size, 0.0, float("inf"))
    checks.check_count("num_data", num_data)
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    checks.check_key("key", key)
