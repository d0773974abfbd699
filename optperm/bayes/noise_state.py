"""What `optperm.scale_by_gradient_noise` keeps, the steps that follow from it, and if they sample."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from optperm.bayes.noise_estimates import Outer
from optperm.bayes.normal_noise import normal_like
from optperm.contract.dtypes import accumulation_dtype, all_finite, cast_like
from optperm.contract.keys import key_data
from optperm.contract.mapped_axes import mark_varying, varying_axes
from optperm.contract.shardings import can_be_seen, unshard
from optperm.contract.states import mask_like

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree, UInt32

# Above the first, variances are off by more than a third; at the second one steps diverge.
DOUBTFUL, UNSTABLE = 0.5, 2.0
# So large a share of the estimates may be of another gradient than the one that moves the params.
_LARGEST_FOREIGN = 0.02
_LARGEST_UNEVEN = 0.2
# A power iteration takes so many of its products for the weight of a new one.
_FORGETTING = 5.0
# So many looks at the noise, where it should no longer change, are averaged.
_LATE_LOOKS = 64


class GradientNoiseState(NamedTuple):
    r"""State of `scale_by_gradient_noise`.

    Attributes:
      count: Steps taken.
      steps: Those of them that moved params by the preconditioned gradient.
      estimates: How many estimates are in :math:`C`, without those that count as a few.
      weight: :math:`w`, the weight of all estimates so far: 0 before the first, then towards 1.
      covariance: :math:`C`, as much of it as the preconditioner needs: the mean of its diagonal, the
        diagonal as a tree like params, or all of it; in float32 or the params' dtype if wider.
      factor: With the full preconditioner, the Cholesky factor of what is inverted; zero as long as
        there is none. Else an empty tuple.
      scale: :math:`2 S T / N`, as of the last step.
      damping: The least noise, in the units of :math:`C`.
      max_step: The largest step size; infinite for no limit.
      filling: :math:`b`, the noise that is filled in, in the units of :math:`C`; 0 without.
      curvature: With filled noise :math:`\lambda_{\max}(A)`, else 0.
      stability: :math:`\lambda_{\max}(H A)`, of the steps as they are taken; 0 where it is not known.
      largest_noise: With filled noise :math:`\lambda_{\max}(C)`, else 0.
      late_noise: With filled noise, the mean of :math:`v^\top C v` along the direction of the noise
        since :math:`C` is constant.
      late_square: That of its square.
      late_looks: How often it was looked at.
      curvature_direction: The vector of the power iteration of :math:`A`, or of :math:`H A`.
      noise_direction: That of :math:`C`; without filled noise an empty tuple.
      unstable: How many steps were not taken because they would diverge.
      foreign: How many of the estimates met another gradient than that of the extra arguments, whose
        noise they tell.
      uneven: How many of the estimates by the gradient of each example met a batch's gradient that is
        not the mean of theirs.
      key: The raw random key of the filled noise.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    steps: Int32[Array, ""]
    estimates: Int32[Array, ""]
    weight: Float32[Array, ""]
    covariance: Float[Array, ""] | Float[Array, "d d"] | PyTree[Float[Array, "?*shape"], "Params"]
    factor: PyTree[Float[Array, "d d"]]
    scale: Float[Array, ""]
    damping: Float[Array, ""]
    max_step: Float[Array, ""]
    filling: Float[Array, ""]
    curvature: Float[Array, ""]
    stability: Float[Array, ""]
    largest_noise: Float[Array, ""]
    late_noise: Float[Array, ""]
    late_square: Float[Array, ""]
    late_looks: Int32[Array, ""]
    curvature_direction: PyTree[Float[Array, "?*shape"], "Params"]
    noise_direction: Any
    unstable: Int32[Array, ""]
    foreign: Int32[Array, ""]
    uneven: Int32[Array, ""]
    key: UInt32[Array, "2"]

    def preconditioned(self, grads: optax.Updates) -> optax.Updates:
        """H g, in the dtypes of g.

        Args:
          grads: g, a tree like the params; the diagonal preconditioner leaves out itself what it does
            not see under `optax.masked` or `optax.partition`, the others cannot.
        """
        if not isinstance(self.factor, tuple):
            moves = self._solve(grads)
        elif is_number(self.covariance):
            h = self._step_size(self.covariance)
            moves = jax.tree.map(lambda g: h * jnp.asarray(g, h.dtype), grads)
        else:
            grads = mask_like(grads, self.covariance)
            steps = jax.tree.map(self._step_size, self.covariance)
            moves = jax.tree.map(lambda h, g: h * jnp.asarray(g, h.dtype), steps, grads)
        return cast_like(moves, grads)

    def _step_size(self, covariance: jax.Array) -> jax.Array:
        """Of entries with this noise; without any noise and without a limit there is no step."""
        scale, damping, limit, filling = (
            jnp.asarray(x, covariance.dtype)
            for x in (self.scale, self.damping, self.max_step, self.filling)
        )
        step = jnp.minimum(scale / jnp.maximum(covariance + filling, damping), limit)
        return jnp.where(jnp.isfinite(step), step, jnp.zeros_like(step))

    def _solve(self, grads: optax.Updates) -> optax.Updates:
        grads = jax.tree.map(lambda g: jnp.asarray(g, self.factor.dtype), unshard(grads))
        flat, unflatten = ravel_pytree(grads)
        _check_size(flat.size, self.factor)
        solution = jax.scipy.linalg.cho_solve((self.factor, True), flat)
        step = self.scale * solution
        return unflatten(jnp.where(self.is_ready(), step, jnp.zeros_like(step)))

    def is_ready(self) -> jax.Array | bool:
        """Whether there is a factor of what the full preconditioner inverts; else there is no step."""
        return isinstance(self.factor, tuple) or jnp.all(jnp.diagonal(self.factor) > 0)

    def share_at_max_step(self) -> jax.Array | None:
        """The share of the params whose step is the largest allowed; None where a step mixes them."""
        if not isinstance(self.factor, tuple):
            return None
        sizes, _ = ravel_pytree(jax.tree.map(self._step_size, self.covariance))
        return jnp.mean(sizes >= self.max_step.astype(sizes.dtype))


def initial_state(
    params: optax.Params,
    outer: Outer,
    limits: dict[str, jax.Array],
    seed: int | jax.Array,
    *,
    is_full: bool,
    fill: bool,
) -> GradientNoiseState:
    """The state before the first step.

    Args:
      params: The params.
      outer: What is kept of C.
      limits: Scale, damping and the largest step.
      seed: That of the filled noise.
      is_full: Whether there is a factor.
      fill: Whether there is noise to fill in.
    """
    covariance = outer(
        jax.tree.map(lambda p: jnp.zeros_like(p, accumulation_dtype(p))[None], params)
    )
    zero = mark_varying(jnp.zeros([], accumulation_dtype(params)), varying_axes(params))
    # Each is an array of its own: states may be donated.
    counts = ("count", "steps", "estimates", "unstable", "foreign", "uneven", "late_looks")
    found = (
        "filling",
        "curvature",
        "stability",
        "largest_noise",
        "late_noise",
        "late_square",
    )
    return GradientNoiseState(
        **{name: jnp.zeros([], jnp.int32) for name in counts},
        **{name: zero.copy() for name in found},
        weight=jnp.array(zero, jnp.float32),
        covariance=covariance,
        factor=jnp.zeros_like(covariance) if is_full else (),
        **limits,
        curvature_direction=normal_like(key_data(0), params),
        noise_direction=normal_like(key_data(1), params) if fill else (),
        key=key_data(seed),
    )


def with_estimate(
    state: GradientNoiseState,
    estimate: tuple[Any, jax.Array],
    kappa: jax.Array,
    *,
    is_foreign: jax.Array,
) -> GradientNoiseState:
    """The state with one more estimate of C, if it is finite.

    Args:
      state: The state before.
      estimate: The estimate, and whether the gradient is not the mean of those of the examples.
      kappa: The weight.
      is_foreign: Whether what is preconditioned is not the gradient whose noise this is.
    """
    sample, is_uneven = estimate
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
        estimates=state.estimates + is_sound.astype(jnp.int32),
        foreign=state.foreign + (is_sound & is_foreign).astype(jnp.int32),
        uneven=state.uneven + (is_sound & is_uneven).astype(jnp.int32),
        weight=jnp.where(is_sound, weight, state.weight),
        covariance=jax.tree.map(towards, state.covariance, sample),
    )


def with_largest_noise(
    state: GradientNoiseState, product: optax.Updates, taken: jax.Array, is_late: jax.Array | bool
) -> GradientNoiseState:
    r"""The state with one more step of the power iteration for :math:`\lambda_{\max}(C)`.

    Where :math:`C` is constant nothing that steps are made of changes any more: how much noise there is
    along the direction that was found is kept beside it.

    Args:
      state: The state before.
      product: That of an estimate of C with the state's direction of the noise.
      taken: Steps of the iteration before this one.
      is_late: Whether :math:`C` is constant.
    """
    # lambda = mean of v^T C v
    v = state.noise_direction
    quotient = _inner(v, product)
    largest, direction = _iterated(state.largest_noise, v, product, quotient, taken)
    soon = state._replace(largest_noise=largest, noise_direction=direction)
    if is_late is False:
        return soon
    rate = jnp.maximum(1 / (state.late_looks + 1), 1 / _LATE_LOOKS).astype(quotient.dtype)
    late = state._replace(
        late_noise=state.late_noise + rate * (quotient - state.late_noise),
        late_square=state.late_square + rate * (quotient**2 - state.late_square),
        late_looks=state.late_looks + 1,
    )
    return optax.tree.where(is_late, optax.tree.where(jnp.isfinite(quotient), late, state), soon)


def with_curvature(
    state: GradientNoiseState,
    product_fn: Callable[[optax.Updates], optax.Updates],
    taken: jax.Array,
) -> GradientNoiseState:
    r"""The state with one more step of the power iteration for :math:`\lambda_{\max}(A)`.

    Args:
      state: The state before.
      product_fn: The product of a batch's :math:`A` with a tree like params.
      taken: Steps of the iteration before this one.
    """
    # lambda = mean of s^T A s
    s = state.curvature_direction
    product = product_fn(s)
    largest, direction = _iterated(state.curvature, s, product, _inner(s, product), taken)
    return state._replace(curvature=largest, curvature_direction=direction)


def with_stability(
    state: GradientNoiseState,
    product_fn: Callable[[optax.Updates], optax.Updates],
    taken: jax.Array,
    step_factor: jax.Array,
) -> GradientNoiseState:
    r"""The state with one more step of the power iteration for :math:`\lambda_{\max}(H A)`.

    Args:
      state: The state before.
      product_fn: The product of a batch's :math:`A` with a tree like params.
      taken: Steps of the iteration before this one.
      step_factor: What the steps are multiplied by later on.
    """
    # lambda = mean of v^T A v / s^T v, v = H s
    s = state.curvature_direction
    v = state.preconditioned(s)
    product = product_fn(v)
    quotient = step_factor * _inner(v, product) / _inner(s, v)
    largest, direction = _iterated(state.stability, s, product, quotient, taken)
    return state._replace(stability=largest, curvature_direction=direction)


def _iterated(
    largest: jax.Array,
    direction: optax.Updates,
    product: optax.Updates,
    quotient: jax.Array,
    taken: jax.Array,
) -> tuple[jax.Array, optax.Updates]:
    """A running mean of quotients and of normalized products, in which older ones fade."""
    # Where counting begins anew the direction is half of what it was.
    rate = jnp.minimum(_FORGETTING / (taken.astype(largest.dtype) + _FORGETTING), 0.5)
    rate = jnp.where(largest == 0, 1.0, rate).astype(largest.dtype)
    quotient = quotient.astype(largest.dtype)
    mean = largest + rate * (quotient - largest)
    size = jnp.sqrt(_inner(product, product)).astype(largest.dtype)
    # Divided by its size where the mean is not one to divide by.
    divisor = jnp.where(mean > 0, mean, size)
    mixed = jax.tree.map(
        lambda s, a: (1 - rate).astype(s.dtype) * s + (rate / divisor).astype(s.dtype) * a,
        direction,
        product,
    )
    norm = jnp.sqrt(_inner(mixed, mixed))
    is_sound = jnp.isfinite(quotient) & jnp.isfinite(norm) & (norm > 0)
    moved = jax.tree.map(
        lambda m, s: jnp.where(is_sound, m / norm.astype(m.dtype), s), mixed, direction
    )
    return jnp.where(jnp.isfinite(quotient), mean, largest), moved


def _inner(one: optax.Updates, other: optax.Updates) -> jax.Array:
    """The inner product of two trees, in float32 or wider."""
    dtype = accumulation_dtype(one)
    parts = jax.tree.map(lambda a, b: jnp.sum(a * b.astype(a.dtype)).astype(dtype), one, other)
    return sum(jax.tree.leaves(parts), start=jnp.zeros([], dtype))


def refilled(
    state: GradientNoiseState,
    stability: jax.Array,
    rho: jax.Array | None,
    step_factor: jax.Array,
) -> GradientNoiseState:
    r"""The state with the noise that is filled in from the largest eigenvalues found so far.

    .. math::
      b = \max\left(\frac{2 S T \lambda_{\max}(A)}{N c}, \frac{\lambda_{\max}(C)}{\rho}, \dots\right)

    `damping` and `max_step` are bounds on b too: so both keep the law.

    Args:
      state: The state before.
      stability: c.
      rho: :math:`\rho`; None with the full preconditioner, which needs no more than the first.
      step_factor: What the steps are multiplied by later on.
    """
    bounds = [
        state.scale * state.curvature / stability,
        state.damping,
        state.scale / state.max_step,
    ]
    if rho is not None:
        bounds.append(state.largest_noise / rho)
    filling = functools.reduce(jnp.maximum, bounds)
    eigenvalue = step_factor * state.scale * state.curvature / filling
    eigenvalue = jnp.where(filling > 0, eigenvalue, 0.0)
    return state._replace(
        filling=jnp.maximum(filling, 0.0), stability=eigenvalue.astype(filling.dtype)
    )


def with_factor(
    state: GradientNoiseState, is_enough: jax.Array, *, is_limited: bool
) -> GradientNoiseState:
    """The state with the factor for the next step, if there is one.

    Args:
      state: The state before.
      is_enough: Whether there are enough estimates to be inverted.
      is_limited: Whether the eigenvalues of H have a limit that filled noise does not keep already.
    """
    identity = jnp.identity(len(state.covariance), dtype=state.covariance.dtype)
    matrix = state.covariance + jnp.maximum(state.damping, state.filling) * identity
    if is_limited:
        # All eigenvalues of H are at most max_step if those of C are at least this.
        values, vectors = jnp.linalg.eigh(matrix)
        missing = jnp.maximum(state.scale / state.max_step - values, 0.0)
        matrix += jnp.matmul(
            vectors * missing[None], vectors.T, precision=jax.lax.Precision.HIGHEST
        )
    factor = jnp.linalg.cholesky(matrix)
    is_sound = jnp.all(jnp.isfinite(factor)) & (state.weight > 0) & is_enough
    return state._replace(factor=jnp.where(is_sound, factor, state.factor))


def warn_if_unstable(state: GradientNoiseState) -> None:
    """Gives the warnings of `faults_of`, or raises as it does."""
    for fault in faults_of(state):
        warnings.warn(fault, stacklevel=3)


def faults_of(state: GradientNoiseState) -> list[str]:
    """What a state tells of steps that do not sample, a sentence each, where it can be looked at.

    Args:
      state: Of one chain or of several; nothing is said of a traced one.

    Raises:
      ValueError: If steps were not taken, because they would diverge.
    """
    numbers = (
        state.stability,
        state.unstable,
        state.steps,
        state.foreign,
        state.uneven,
        state.estimates,
    )
    if not all(can_be_seen(number) for number in numbers):
        return []
    found = []
    largest = float(np.max(np.asarray(state.stability)))
    is_filled = not isinstance(state.noise_direction, tuple)
    if np.any(np.asarray(state.unstable) > 0):
        advice = (
            "Lower stability or learning_rate, whose product decides it."
            if is_filled
            else "Use constant_sgd(..., fill=True), or smaller batches, a smaller max_step or more "
            "damping."
        )
        raise ValueError(
            f"These steps do not sample, they diverge: lambda_max(H A) is {largest:.3g}, 2 or more, so "
            f"none was taken. {advice}"
        )
    if largest > DOUBTFUL and np.any(np.asarray(state.steps) > 0):
        off = 1 / max(1 - largest / 2, 1e-3)
        advice = (
            "Lower stability or learning_rate, whose product it is (.2 by default)."
            if is_filled
            else "Use constant_sgd(..., fill=True), or smaller batches."
        )
        # The noise of the batches, which shortens steps too, is not in b alone.
        bound = "is at most" if is_filled else "is"
        found.append(
            f"lambda_max(H A) {bound} {largest:.3g}: in that direction the variance of the draws is "
            f"about {off:.2g} times what it should be. {advice}"
        )
    if share_of(state.uneven, state) > _LARGEST_UNEVEN:
        found.append(
            "The gradient of the batch is not the mean of those of its examples, whose noise the steps "
            "are made for, and the draws do not follow the posterior: the loss sums over the batch, has "
            "weights of examples, or mixes them as BatchNorm does. Use jnp.mean of what each example "
            "loses, with weights as factors in it, or for a loss that mixes them "
            "estimator='two_batches'."
        )
    if share_of(state.foreign, state) > _LARGEST_FOREIGN:
        # Without the share, which another step changes: Python gives the same text once.
        found.append(
            f"In more than {_LARGEST_FOREIGN:.0%} of the estimates of the noise the gradient was not "
            "the one of the extra arguments: its noise is not the one that the steps are made for, and "
            "the draws do not follow the posterior. Nothing that changes gradients belongs in front of "
            "constant_sgd or around it: no clipping, no svrg (sgld and sghmc take it), no weight decay "
            "(normal_prior goes into the loss), no MultiSteps (chunk_size= saves memory)."
        )
    return found


def share_of(some: jax.Array, state: GradientNoiseState) -> float:
    """What share of the estimates some of them are; of several chains the largest."""
    return float(np.max(np.asarray(some) / np.maximum(np.asarray(state.estimates), 1)))


def _check_size(size: int, factor: jax.Array) -> None:
    if size != len(factor):
        raise ValueError(
            f"The optimizer state was made for {len(factor)} params, but there are {size} here."
        )


def is_number(tree: Any) -> bool:
    """Whether a tree is a single number."""
    return jax.tree_util.all_leaves([tree]) and jnp.ndim(tree) == 0
