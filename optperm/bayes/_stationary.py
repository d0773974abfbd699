"""The stationary covariance of constant SGD on a quadratic, and the KL divergence of Gaussians.

S. Mandt, M. Hoffman and D. Blei, "Stochastic Gradient Descent as Approximate Bayesian Inference",
JMLR 18(134), arXiv 1704.04289, 2017.

The equations are solved in float64, because I - HA differs too little from I for float32.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optperm.core import checks
from optperm.core.dtypes import accumulation_dtype

# After 2^44 steps, even a recursion that forgets 1e-12 of the past per step has forgotten the past.
_MAX_DOUBLINGS = 44


def stationary_covariance(
    preconditioner: jax.Array | np.ndarray | float,
    hessian: jax.Array | np.ndarray,
    noise: jax.Array | np.ndarray,
    *,
    momentum: float | jax.Array = 0.0,
    continuous: bool = False,
) -> jax.Array:
    r"""Return the stationary covariance of SGD with a constant preconditioner on a quadratic.

    Around the optimum, SGD takes the steps :math:`\theta_{t+1} = \theta_t - H (A \theta_t + \epsilon_t)`
    with :math:`\epsilon_t \sim N(0, R)`. Its stationary covariance solves the discrete Lyapunov equation

    .. math::
      \Sigma = (I - HA)\, \Sigma\, (I - HA)^\top + H R H^\top

    With momentum, :math:`v_{t+1} = \mu v_t + A \theta_t + \epsilon_t` and
    :math:`\theta_{t+1} = \theta_t - H v_{t+1}` as in `optax.trace`, :math:`\Sigma` is the block of
    :math:`\theta` in the covariance of :math:`(\theta, H v)`. In the limit of small steps (continuous
    time in the paper),

    .. math::
      H A \Sigma + \Sigma A H^\top = \frac{1}{1 - \mu} H R H^\top

    Args:
      preconditioner: H: a number, a diagonal (D,), or a matrix (D, D). H includes the learning rate.
      hessian: A, (D, D), symmetric: the Hessian of the mean loss.
      noise: R, (D, D), symmetric: the covariance of a batch's gradient, C / S for batches of S examples
        whose single gradients have the covariance C.
      momentum: :math:`\mu \in [0, 1)`, Optax's decay.
      continuous: Whether to take the limit of small steps.

    Returns:
      :math:`\Sigma`, (D, D), in float64 if an argument is float64 and JAX enables it, otherwise in
      float32. If the matrices are traced and no stationary distribution exists, :math:`\Sigma` is NaN.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> posterior = jnp.linalg.inv(1000 * jnp.array([[2.0, 0.5], [0.5, 1.0]]))
      >>> hessian = noise = jnp.array([[2.0, 0.5], [0.5, 1.0]])
      >>> h = 2 * 10 / 1000 * jnp.linalg.inv(noise)  # batches of 10 of 1000 examples
      >>> limit = optperm.bayes.stationary_covariance(h, hessian, noise / 10, continuous=True)
      >>> bool(jnp.allclose(limit, posterior))
      True

    Notes:
      This function has derivatives in forward mode (`jax.jacfwd`), but none in reverse mode, because it
      loops until a sum has converged.

    Raises:
      TypeError: If an argument is not an array of numbers.
      ValueError: If numbers are not real, shapes do not match, a matrix is not symmetric or not finite,
        momentum is out of range, or no stationary distribution exists because steps are too long or a
        direction has no curvature.

    References:
      Mandt, Hoffman and Blei, `Stochastic Gradient Descent as Approximate Bayesian Inference
      <https://arxiv.org/abs/1704.04289>`_, 2017, equations 13 and 16
    """
    d = _check_symmetric("hessian", hessian)
    _check_symmetric("noise", noise, (d, d))
    _check_array("preconditioner", preconditioner, (), (d,), (d, d))
    checks.check_in_range("momentum", momentum, 0.0, np.nextafter(1.0, 0.0), may_be_schedule=False)

    arguments = (preconditioner, hessian, noise, momentum)
    dtype = accumulation_dtype((preconditioner, hessian, noise))
    with jax.enable_x64(True):
        h, a, r, mu = (jnp.asarray(each, jnp.float64) for each in arguments)
        h = h if h.ndim == 2 else jnp.diag(jnp.broadcast_to(h, (d,)))
        drift, diffusion = _product(h, a), _sandwich(h, r)
        identity = jnp.eye(d, dtype=jnp.float64)
        if continuous:
            transition, diffusion = _cayley(drift, diffusion / (1.0 - mu))
        elif checks.is_concrete_number(momentum) and not momentum:
            transition = identity - drift
        else:
            # The state is (theta, H v): H v' = mu H v + H (A theta + epsilon), theta' = theta - H v'.
            friction = mu * identity
            transition = jnp.block([[identity - drift, -friction], [drift, friction]])
            diffusion = jnp.block([[diffusion, -diffusion], [-diffusion, diffusion]])
        covariance = _solve_by_doubling(transition, diffusion)[:d, :d]
        covariance = jax.lax.convert_element_type(covariance, dtype)
    if not isinstance(covariance, jax.core.Tracer) and not np.all(np.isfinite(covariance)):
        _raise_why(np.asarray(transition), continuous=continuous)
    return covariance


def gaussian_kl(
    mean: jax.Array | np.ndarray,
    covariance: jax.Array | np.ndarray,
    other_mean: jax.Array | np.ndarray,
    other_covariance: jax.Array | np.ndarray,
) -> jax.Array:
    r"""Return the Kullback-Leibler divergence of one Gaussian from another.

    .. math::
      \mathrm{KL}(N(m, \Sigma) \,\|\, N(m', \Sigma')) = \tfrac12 \left( \mathrm{tr}(\Sigma'^{-1} \Sigma)
      + (m' - m)^\top \Sigma'^{-1} (m' - m) - D + \log \frac{\det \Sigma'}{\det \Sigma} \right)

    Args:
      mean: m, (D,).
      covariance: :math:`\Sigma`, (D, D), symmetric and positive definite.
      other_mean: m', (D,).
      other_covariance: :math:`\Sigma'`, (D, D), symmetric and positive definite.

    Returns:
      The divergence in nats, a scalar in float64 if an argument is float64 and JAX enables it, otherwise
      in float32. The computation is in float64, or in the dtype of the result if the matrices are
      traced. If they are traced and a covariance is not positive definite, the result is NaN.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> zero, one = jnp.zeros(2), jnp.eye(2)
      >>> float(optperm.bayes.gaussian_kl(zero, one, jnp.array([3.0, 4.0]), one))  # half of 5 squared
      12.5

    Raises:
      TypeError: If an argument is not an array of numbers.
      ValueError: If numbers are not real, shapes do not match, or a covariance is not symmetric, finite
        and positive definite.
    """
    d = _check_symmetric("covariance", covariance)
    _check_symmetric("other_covariance", other_covariance, (d, d))
    _check_array("mean", mean, (d,))
    _check_array("other_mean", other_mean, (d,))
    arguments = (mean, covariance, other_mean, other_covariance)
    dtype = accumulation_dtype(arguments)
    # Traced arguments and their derivatives already have a dtype
    is_seen = not any(isinstance(each, jax.core.Tracer) for each in arguments)
    with jax.enable_x64(True) if is_seen else contextlib.nullcontext():
        wide = jnp.float64 if is_seen else dtype
        m, sigma, other_m, other_sigma = (jnp.asarray(each, wide) for each in arguments)
        factor, other_factor = jnp.linalg.cholesky(sigma), jnp.linalg.cholesky(other_sigma)
        for name, each in (("covariance", factor), ("other_covariance", other_factor)):
            if not isinstance(each, jax.core.Tracer) and not np.all(np.isfinite(each)):
                raise ValueError(
                    f"{name} must be positive definite, unlike a sample covariance of too few samples. "
                    "If the condition number is above 1e7, float32 may not suffice: pass float64."
                )

        # Sum tr K K^T - D - log det K K^T with K = L'^-1 L entry by entry. No term is negative, so a
        # small divergence is not lost in a difference of large numbers
        right = jnp.concatenate([factor, (other_m - m)[:, None]], axis=1)
        whitened = jax.scipy.linalg.solve_triangular(other_factor, right, lower=True)
        ratio, shift = whitened[:, :-1], whitened[:, -1]
        diagonal = jnp.diag(ratio)
        excess = (diagonal - 1.0) * (diagonal + 1.0)
        off_diagonal = jnp.tril(ratio, -1)
        total = jnp.sum(excess - jnp.log1p(excess)) + jnp.sum(off_diagonal**2) + jnp.sum(shift**2)
        return jax.lax.convert_element_type(0.5 * total, dtype)


def _cayley(drift: jax.Array, diffusion: jax.Array) -> tuple[jax.Array, jax.Array]:
    r"""Return a recursion whose covariance solves :math:`G \Sigma + \Sigma G^\top = Q`.

    For any :math:`\tau > 0`, with :math:`M = I + \tau G`, it has the transition
    :math:`M^{-1} (I - \tau G)` and the noise :math:`2 \tau M^{-1} Q M^{-\top}`.
    """
    identity = jnp.eye(len(drift), dtype=drift.dtype)
    size = jnp.max(jnp.sum(jnp.abs(drift), axis=1))
    scaled = drift / jnp.where(size > 0, size, 1.0)
    inverse = jnp.linalg.inv(identity + scaled)
    return _product(inverse, identity - scaled), _sandwich(
        inverse, 2.0 * diffusion / jnp.where(size > 0, size, 1.0)
    )


def _solve_by_doubling(transition: jax.Array, diffusion: jax.Array) -> jax.Array:
    r"""Return :math:`\sum_t F^t Q (F^t)^\top` by doubling the number of terms; NaN if it diverges."""

    def has_more(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        index, power, _ = carry
        size = jnp.sum(power**2)
        return (size > 1e-20) & (size < 1e100) & (index < _MAX_DOUBLINGS)

    def double(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, Any, Any]:
        index, power, total = carry
        return index + np.int32(1), _product(power, power), total + _sandwich(power, total)

    start = (jnp.zeros([], jnp.int32), transition, diffusion)
    _, power, total = jax.lax.while_loop(has_more, double, start)
    has_limit = jnp.sum(power**2) <= 1e-20
    return jnp.where(has_limit, (total + total.T) / 2, jnp.nan)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    # The operator @ specifies float64, which jax.vmap rejects outside enable_x64
    return jax.lax.dot_general(a, b, (((1,), (0,)), ((), ())))


def _sandwich(a: jax.Array, middle: jax.Array) -> jax.Array:
    return _product(_product(a, middle), a.T)


def _raise_why(transition: np.ndarray, *, continuous: bool) -> None:
    if continuous:
        why = "preconditioner @ hessian has an eigenvalue whose real part is not positive: add a prior"
    else:
        finite = np.all(np.isfinite(transition))
        radius = np.abs(np.linalg.eigvals(transition)).max() if finite else np.inf
        why = f"the spectral radius of a step is {radius:.6g}: take smaller steps, or add a prior"
    raise ValueError(f"No stationary distribution exists: {why}.")


def _check_array(name: str, value: Any, *shapes: tuple[int, ...]) -> None:
    """Raise unless an array has a real dtype and one of the shapes."""
    dtype, shape = checks.dtype_of(name, value), jnp.shape(value)
    if not checks.is_real(dtype) or (shapes and shape not in shapes):
        wanted = " or ".join(map(str, shapes)) or "(D, D)"
        raise ValueError(f"{name} must be real and of shape {wanted}, got {dtype}{list(shape)}.")


def _check_symmetric(name: str, matrix: Any, *shapes: tuple[int, ...]) -> int:
    """Return the number of rows; raise unless a matrix is square and, if concrete, symmetric."""
    _check_array(name, matrix, *shapes)
    shape = jnp.shape(matrix)
    if len(shape) != 2 or shape[0] != shape[1] or not shape[0]:
        raise ValueError(
            f"{name} must be a square matrix, got shape {shape}. For a diagonal d, pass jnp.diag(d)."
        )
    if not isinstance(matrix, jax.core.Tracer):
        values = np.asarray(matrix, np.float64)
        most = 1e-3 * np.abs(values).max()
        if not (np.isfinite(most) and np.abs(values - values.T).max() <= most):
            raise ValueError(f"{name} must be finite, and symmetric up to rounding.")
    return int(shape[0])
