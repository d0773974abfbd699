"""Constant SGD: SGD with constant step sizes, whose iterates are samples from a posterior.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), 2017, with injected noise whose covariance fits the problem, averaged over two steps as in
B. Leimkuhler and C. Matthews, "Rational Construction of Stochastic Numerical Methods for Molecular
Sampling", Applied Mathematics Research eXpress, 2013.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._control_variates import correct
from optperm.bayes._faults import judge_altered, judge_kernel, judge_steps, judge_temperature
from optperm.bayes._kernel import NoiseKernel, check_is_kernel, check_kernel
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

_NEEDS = {"grad_fn": "the gradient of the batch at given params"}


class ConstantSgdState(NamedTuple):
    """State of `constant_sgd`.

    Attributes:
      count: Number of steps taken.
      key: The raw random key of the injected noise.
      velocity: v, a tree like params, in float32 or wider.
      noise: z of the last step, a tree like params; 0 before the first step.
      kernel: The noise, the curvature and the basis of the steps.
      limit: c times the `learning_rate` of the last step.
      temperature: T of the last step.
      left_out: Number of steps that left out entries with a nonfinite gradient.
      altered: With control variates, number of steps whose updates were not the extra argument `grad`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    velocity: PyTree[Float[Array, "?*shape"], "Params"]
    noise: PyTree[Float[Array, "?*shape"], "Params"]
    kernel: NoiseKernel
    limit: Float32[Array, ""]
    temperature: Float32[Array, ""]
    left_out: Int32[Array, ""]
    altered: Int32[Array, ""]

    def for_loop(self) -> ForLoop:
        """Return that batches must be drawn with replacement, and the sizes of the data and a batch."""
        n, size = self.kernel.num_data, self.kernel.batch_size
        return ForLoop(draws_examples=True, num_data=n, batch_size=size)

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
        found = judge_steps(self.kernel, self.count) + judge_altered(self.altered)
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
      v_t = \mu v_{t-1} + H (g_t + \tfrac12 (\xi_t + \xi_{t-1})), \qquad
      \theta_{t+1} = \theta_t - (1 - \mu) v_t

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
    the covariance :math:`(2 T / N) H` for any such h. The mean of two successive :math:`\xi` (Leimkuhler
    and Matthews) has the same sum over many steps. Near an optimum, where a fraction
    :math:`\varphi_i = h_i \Lambda_i / s` of the noise is from the batches, draws follow
    :math:`N(\theta^*, T (N A)^{-1})` with variances multiplied by

    .. math::
      1 + \varphi_i \frac{c_i / 2}{1 - c_i / 2}, \qquad c_i = h_i a_i, \qquad
      a_i = \frac{1 - \mu}{1 + \mu} w_i^\top A w_i

    for any :math:`c_i` below 2: exactly the posterior without noise from the batches. If the kernel has
    control variates, the gradient :math:`g_t` is :math:`g_B(\theta) - g_B(\theta^*) + \nabla
    L(\theta^*)`, which hardly has noise (`optperm.bayes.learn_kernel`). This noise is proportional to
    :math:`|\theta - \theta^*|^2`, so :math:`T \Lambda` replaces :math:`\Lambda`. In every direction, the
    chain moves as fast as c and the noise of the batches allow, even if the posterior is long and
    narrow. Without injected noise, this is the method of Mandt, Hoffman and Blei
    (`optperm.mandt_sgd`); without noise from the batches, this is Langevin dynamics.

    `optperm.bayes.learn_kernel` learns :math:`W, \Lambda, a` and :math:`\rho` near an optimum, and
    returns the params at which every step of this transformation samples. `optperm.bayes.sample` runs
    the loop for you.

    Args:
      kernel: The kernel from `optperm.bayes.learn_kernel`, for the same loss, data and params. It
        contains N, S, the momentum :math:`\mu` and the stability c.
      temperature: T, a factor that multiplies the posterior's covariance, a number or a schedule.
      learning_rate: A factor that multiplies c and :math:`\rho`, a number or a schedule. It does not
        change the stationary distribution to first order in c.
      key: A random key for the injected noise, or an int. `optperm.bayes.draw_samples` gives each chain
        its own noise. In your own loop, initialize the state of each chain with a different key.

    Returns:
      A transformation whose `update` needs `params`, and batches of S examples drawn with replacement.
      With control variates, it also needs the extra argument `grad_fn` of `optperm.evaluate`, which
      evaluates the batch at :math:`\theta^*`. With `optax.MultiSteps`, S counts the examples of all
      batches of a step, and the kernel must not have control variates.

    Example:
      >>> import jax, jax.numpy as jnp, optax, optperm
      >>> x = jax.random.normal(jax.random.key(0), (1000, 2))
      >>> y = x @ jnp.array([1.0, 2.0]) + jax.random.normal(jax.random.key(1), (1000,))
      >>> loss_fn = lambda w, batch: jnp.mean((batch[0] @ w - batch[1]) ** 2) / 2
      >>> kernel, w = optperm.bayes.learn_kernel(
      ...     loss_fn, (x, y), jnp.zeros(2), key=0, batch_size=10, steps=2000
      ... )
      >>> tx = optperm.constant_sgd(kernel)
      >>> def step(carry, key):
      ...     w, opt_state = carry
      ...     chosen = jax.random.choice(key, 1000, (10,))
      ...     e = optperm.evaluate(loss_fn, w, (x[chosen], y[chosen]))
      ...     updates, opt_state = tx.update(e.grad, opt_state, w, **e.extra_args)
      ...     w = optax.apply_updates(w, updates)
      ...     return (w, opt_state), w
      >>> keys = jax.random.split(jax.random.key(2), 10_000)
      >>> _, draws = jax.lax.scan(step, (w, tx.init(w)), keys)
      >>> exact = jnp.linalg.inv(x.T @ x)  # covariance of the posterior
      >>> bool(jnp.allclose(jnp.cov(draws.T), exact, atol=2e-4))
      True

    Notes:
      Draw batches with replacement: in a shuffled epoch, the batches' noise is anticorrelated, and the
      draws are too narrow by a fifth or more. In a chain, put nothing that changes gradients (clipping,
      `optperm.svrg`, weight decay) before this transformation, and nothing that scales updates after it.

      The state of the diagonal preconditioner has four numbers per parameter, and six with control
      variates; the state of the full preconditioner contains a D x D matrix, and a step computes two
      matrix-vector products. 16-bit params have remainders of 16 bits.

    Raises:
      TypeError: If an argument has the wrong type, or a parameter does not have a real floating dtype.
      ValueError: If an argument is out of range, if the trees passed to `update` do not match, or if
        `kernel` has an axis of chains, belongs to other params or has no finite curvature. Only the
        number of params of a full kernel can be compared, and nothing of a scalar kernel.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, JMLR 2017

      Leimkuhler and Matthews, `Rational Construction of Stochastic Numerical Methods for Molecular
      Sampling <https://arxiv.org/abs/1203.5428>`_, 2013
    """
    checks.check_in_range("learning_rate", learning_rate, 0.0, float("inf"))
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    checks.check_key("key", key)
    check_is_kernel(kernel)
    _check_stable(kernel.max_stability, learning_rate)

    def init(params: Params) -> ConstantSgdState:
        check_kernel(kernel, params)
        zero = jnp.zeros([], jnp.float32)
        return ConstantSgdState(
            count=jnp.zeros([], jnp.int32),
            key=key_data(key),
            velocity=wide_zeros(params),
            noise=wide_zeros(params),
            # The state may be donated, but the kernel belongs to the caller
            kernel=jax.tree.map(jnp.array, kernel),
            limit=kernel.max_stability + zero,
            temperature=zero + 1,
            left_out=jnp.zeros([], jnp.int32),
            altered=jnp.zeros([], jnp.int32),
        )

    def update(
        g: Updates,
        state: ConstantSgdState,
        params: Params,
        *,
        grad: Any = None,
        grad_fn: Any = None,  # needed with control variates
        **_: Any,
    ) -> tuple[Updates, ConstantSgdState]:
        count, altered = state.count, state.altered
        rate = resolve_schedule("learning_rate", learning_rate, count)
        t = resolve_schedule("temperature", temperature, count)

        # With control variates, Lambda <- T Lambda
        kernel = state.kernel.tempered(t)
        basis, mu = kernel.basis, kernel.momentum

        # g <- g_B(theta) - (g_B(theta*) - grad L(theta*)), where all three have the same batch
        if kernel.anchor:
            altered = altered + _differ(g, grad).astype(jnp.int32)
            g = correct(kernel.anchor, g, grad_fn(kernel.anchor.params))

        # s = 2 S T / N, h_i = s / max(Lambda_i (1 + 1 / rho), s a_i / c), b_i = s / h_i - Lambda_i
        s = kernel.scale(t)
        h = kernel.step_sizes(s, rate)
        b = kernel.injected(h, s)

        # H (g + xi) = W diag(h) (W^T g + diag(sqrt(b / S)) (z + z_-) / 2)
        size = kernel.batch_size
        z = three_point_like(fold(state.key, count), params)
        mean = basis.flat(jax.tree.map(lambda z, last: (z + last) / 2, z, state.noise))
        xi = basis.times(jax.tree.map(lambda b: jnp.sqrt(b / size.astype(b.dtype)), b), mean)
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
            noise=z,
            limit=kernel.max_stability * rate,
            temperature=t,
            left_out=state.left_out + jnp.logical_not(all_finite(g)).astype(jnp.int32),
            altered=altered,
        )

    sampler = transformation(
        init,
        update,
        method="constant_sgd",
        like=lambda state: state.velocity,
        takes_gradient=True,
        needs=_NEEDS if kernel.anchor else {},
    )
    return with_remainders(sampler, method="constant_sgd")


def _differ(g: Updates, grad: Any) -> jax.Array:
    """Return whether updates differ from the gradient of the batch, if it is given."""
    found = jnp.zeros([], jnp.bool_)
    for one, other in () if grad is None else zip(*map(jax.tree.leaves, (g, grad)), strict=True):
        if one is not other:
            found |= ~jnp.array_equal(one, other.astype(one.dtype), equal_nan=True)
    return found


def _check_stable(stability: jax.Array, learning_rate: Any) -> None:
    is_seen = can_be_seen(stability) and checks.is_concrete_number(learning_rate)
    if is_seen and float(stability) * float(learning_rate) >= 2:
        raise ValueError(
            "The kernel's max_stability times learning_rate must be below 2, got "
            f"{float(stability) * float(learning_rate):g}."
        )
