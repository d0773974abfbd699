"""Constant SGD: SGD with constant step sizes, whose iterates are samples from a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017, with injected noise whose covariance fits the problem.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._faults import judge_kernel, judge_stability, judge_temperature
from optperm.bayes._kernel import NoiseKernel, check_kernel
from optperm.bayes._remainders import with_remainders
from optperm.core import checks
from optperm.core.dtypes import all_finite, computed_once, wide_zeros
from optperm.core.keys import key_data
from optperm.core.noise import fold, three_point_like
from optperm.core.schedules import resolve_schedule
from optperm.core.shapes import Array, Float, Float32, Int32, Params, PyTree, UInt32, Updates
from optperm.core.shardings import can_be_seen
from optperm.core.states import ForLoop
from optperm.core.transformation import transformation


class ConstantSgdState(NamedTuple):
    """State of `constant_sgd`.

    Attributes:
      count: Number of steps taken.
      key: The raw random key of the injected noise.
      velocity: v, a tree like params, in float32 or wider.
      kernel: The noise, the curvature and the basis of the steps.
      limit: c times the `learning_rate` of the last step.
      temperature: T of the last step.
      left_out: Number of steps that left out entries with a nonfinite gradient.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    velocity: PyTree[Float[Array, "?*shape"], "Params"]
    kernel: NoiseKernel
    limit: Float32[Array, ""]
    temperature: Float32[Array, ""]
    left_out: Int32[Array, ""]

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement, and the number of training examples."""
        return ForLoop(draws_examples=True, num_data=self.kernel.num_data)

    def numbers(self) -> tuple[jax.Array, jax.Array]:
        """Return c times the `learning_rate`, and the temperature, of the last step."""
        return self.limit, self.temperature

    def preconditioned(self, grads: Updates) -> Updates:
        """Return H g with the step sizes of the kernel at the temperature 1.

        Args:
          grads: g, a tree like the params.
        """
        return self.kernel.precondition(grads, self.kernel.step_sizes(self.kernel.scale()))

    def warnings(self, params: Any = None) -> list[str]:
        """Return reasons why draws may not follow the posterior, as far as Python can see them.

        Args:
          params: Not used.
        """
        del params
        if not can_be_seen(self.count):
            return []
        found = judge_stability(self.kernel.stability, self.count, "stability")
        return found + judge_temperature(self.count, self.temperature) + judge_kernel(self.kernel)


def constant_sgd(
    kernel: NoiseKernel,
    *,
    temperature: optax.ScalarOrSchedule = 1.0,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    key: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Sample from the posterior with SGD and constant step sizes.

    .. math::
      v_t = \mu v_{t-1} + H (g_t + \xi_t), \qquad \theta_{t+1} = \theta_t - (1 - \mu) v_t
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    checks.check_key("key", key)

    def init(params: Params) -> ConstantSgdState:
        check_kernel(kernel, params)
        zero = jnp.zeros([], jnp.float32)
        return ConstantSgdState(
            count=jnp.zeros([], jnp.int32),
            key=key_data(key),
            velocity=wide_zeros(params),
            # The state may be donated, but the kernel belongs to the caller
            kernel=jax.tree.map(jnp.array, kernel),
            limit=kernel.max_stability + zero,
            temperature=zero + 1,
            left_out=jnp.zeros([], jnp.int32),
        )

    def update(
        g: Updates, state: ConstantSgdState, params: Params, **extra_args: Any
    ) -> tuple[Updates, ConstantSgdState]:
        del extra_args
        kernel, count = state.kernel, state.count
        basis, mu = kernel.basis, kernel.momentum
        rate = resolve_schedule("learning_rate", learning_rate, count)
        t = resolve_schedule("temperature", temperature, count)

        # s = 2 S T / N, h_i = s / max(Lambda_i (1 + 1 / rho), s a_i / c), b_i = s / h_i - Lambda_i
        s = kernel.scale(t)
        h = kernel.step_sizes(s, rate)
        b = kernel.injected(h, s)

        # H (g + xi) = W diag(h) (W^T g + diag(sqrt(b / S)) z), with Cov(xi) = W^-T diag(b) W^-1 / S
        size = kernel.batch_size
        z = basis.flat(three_point_like(fold(state.key, count), params))
        xi = basis.times(jax.tree.map(lambda b: jnp.sqrt(b / size.astype(b.dtype)), b), z)
        noisy = optax.tree.add(basis.coordinates(g, h), xi)
        moves = computed_once(basis.params_of(basis.times(h, noisy), params))

        # v' = mu v + H (g + xi), theta' = theta - (1 - mu) v'. An entry that is NaN would stay NaN in v
        velocity = jax.tree.map(
            lambda v, x: (
                mu.astype(v.dtype) * v + jnp.where(jnp.isfinite(x), x, 0.0).astype(v.dtype)
            ),
            state.velocity,
            moves,
        )
        updates = jax.tree.map(lambda v: -(1 - mu).astype(v.dtype) * v, velocity)
        return updates, state._replace(
            count=optax.safe_increment(count),
            velocity=velocity,
            limit=kernel.max_stability * rate,
            temperature=t,
            left_out=state.left_out + jnp.logical_not(all_finite(g)).astype(jnp.int32),
        )

    sampler = transformation(
        init,
        update,
        method="constant_sgd",
        like=lambda state: state.velocity,
        takes_gradient=True,
    )
    return with_remainders(sampler, method="constant_sgd")
