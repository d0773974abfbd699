"""The warm-up of constant SGD: its schedule, and the optimizer of the burn-in."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes._covariance import BatchGradients
from optperm.bayes._masters import with_masters
from optperm.core import checks
from optperm.core.control import when
from optperm.core.dtypes import cast_like, computed_once, wide_zeros
from optperm.core.keys import key_data
from optperm.core.mapped_axes import AxisName
from optperm.core.noise import fold, signs_like
from optperm.core.transformation import transformation
from optperm.exact import Exact, exact_entries

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Int32, PyTree

_LONGEST, _LEAST_OPEN = 2**31 - 1, 1000
# With many examples' gradients per estimate, an eighth of the estimates is enough.
_ESTIMATE_EVERY, _ENOUGH = 8, 500


class Warmup(NamedTuple):
    """The schedule of the warm-up.

    Attributes:
      burn_in: The first step that samples.
      freeze_after: The first step that learns nothing.
      every: Steps from one estimate to the next.
    """

    burn_in: int | jax.Array
    freeze_after: int | jax.Array
    every: int | jax.Array

    def ends(self) -> tuple[jax.Array, ...]:
        """Return the start of the first window and the ends of all five.

        Two windows are in the second half of the burn-in; three end after a quarter, a half and all of
        the steps from the burn-in to `freeze_after`. So the noise far from the optimum is forgotten.
        """
        first, last = (jnp.asarray(x, jnp.int32) for x in (self.burn_in, self.freeze_after))
        left = last - first
        half = (first // 2, first - first // 4, first)
        return *half, first + left // 4, first + left // 2, last

    def is_open(self, count: jax.Array) -> jax.Array:
        """Return whether a step learns."""
        start, *_, last = self.ends()
        return (count >= start) & (count < last) & ((count - start) % self.every == 0)

    def number(self, count: jax.Array) -> jax.Array:
        """Return the number of estimates of a step's window before that step."""
        starts = [jnp.where(start <= count, start, 0) for start in self.ends()]
        return (count - functools.reduce(jnp.maximum, starts)) // self.every

    def ends_window(self, count: jax.Array) -> jax.Array:
        """Return whether a window ends with a step."""
        _, *ends = self.ends()
        return functools.reduce(jnp.logical_or, [count + 1 == end for end in ends])


def warmup(
    burn_in: int | jax.Array,
    freeze_after: int | jax.Array | None,
    batch_size: int | jax.Array,
    estimator: str,
    preconditioner: str | None,
) -> Warmup:
    """Return the schedule of `optperm.constant_sgd`, which learns until after the burn-in."""
    checks.check_count("burn_in", burn_in, minimum=0)
    are_seen = checks.is_concrete_number(burn_in)
    if freeze_after is None:
        left = max(int(burn_in), _LEAST_OPEN) if are_seen else jnp.maximum(burn_in, _LEAST_OPEN)
        freeze_after = min(int(burn_in) + left, _LONGEST) if are_seen else burn_in + left
    checks.check_count("freeze_after", freeze_after)
    are_seen = are_seen and checks.is_concrete_number(freeze_after)
    # Without a burn-in one window learns the noise and another one the curvature
    if are_seen and int(freeze_after) < max(int(burn_in) + 1, 2):
        numbers = f"{freeze_after} and {burn_in}"
        raise ValueError(f"freeze_after must be above burn_in and at least 2, got {numbers}.")
    every = 1
    if are_seen and estimator == "per_example" and preconditioner in ("scalar", "diagonal"):
        is_seen = checks.is_concrete_number(batch_size)
        enough = (int(freeze_after) - int(burn_in)) // _ENOUGH
        every = max(1, min(int(batch_size) // 2 if is_seen else 1, enough, _ESTIMATE_EVERY))
    return Warmup(burn_in, freeze_after, every)


class BurnInState(NamedTuple):
    """State of a sampler whose burn-in another optimizer takes over.

    Attributes:
      count: Steps taken.
      switched: Whether the sampler took the last step.
      first: State of the optimizer of the burn-in; constant after it.
      then: State of the sampler, which learns from all gradients.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    switched: Bool[Array, ""]
    first: Any
    then: Any

    def phases(self) -> list[tuple[Any, Any]]:
        """Return the states of the optimizer of the burn-in and of the sampler, which always learns."""
        return [(self.first, jnp.logical_not(self.switched)), (self.then, True)]

    def exact(self) -> list[Exact]:
        """Return the exact entries of the optimizer during the burn-in."""
        is_first = jnp.logical_not(self.switched)
        return [each.only_if(is_first) for each in exact_entries(self.first)]


def after_burn_in(
    burn_in: int | jax.Array,
    burn_in_optimizer: optax.GradientTransformation,
    *steps: optax.GradientTransformation,
    method: str,
) -> optax.GradientTransformationExtraArgs:
    """Return a sampler whose burn-in another optimizer takes over.

    Args:
      burn_in: Steps of the other optimizer.
      burn_in_optimizer: The other optimizer.
      *steps: The chain of the sampler.
      method: The sampler's public name, for messages.
    """
    checks.check_transformation("burn_in_optimizer", burn_in_optimizer)
    before = optax.with_extra_args_support(burn_in_optimizer)
    after = optax.with_extra_args_support(optax.chain(*steps))

    def init(params: optax.Params) -> BurnInState:
        zero = jnp.zeros([], jnp.int32)
        return BurnInState(zero, zero > 0, before.init(params), after.init(params))

    def update(
        g: optax.Updates, state: BurnInState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, BurnInState]:
        is_over = state.switched | (state.count >= jnp.asarray(burn_in, jnp.int32))
        # One sampler for both phases, not one in each branch: half the program, and its state in place
        moves, then = after.update(g, state.then, params, **extra_args)

        def first(known: tuple[optax.Updates, Any]) -> tuple[optax.Updates, Any]:
            return cast_like(before.update(g, known[1], params, **extra_args), known)

        moves, first_state = when(jnp.logical_not(is_over), first, (moves, state.first))
        return moves, BurnInState(optax.safe_increment(state.count), is_over, first_state, then)

    outer = transformation(init, update, method=method, is_wrapper=True)
    return with_masters(outer, method=method)


class NewtonState(NamedTuple):
    r"""State of `diagonal_newton`.

    Attributes:
      count: Steps taken.
      mean: m, the running mean of the gradients, a tree like params.
      square: :math:`d^2`, the running mean of the square of each entry's curvature.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mean: PyTree[Float[Array, "?*shape"], "Params"]
    square: PyTree[Float[Array, "?*shape"], "Params"]


_RATE, _HALVING, _LARGEST = 0.1, 100.0, 0.02


def diagonal_newton(axis_name: AxisName | None = None) -> optax.GradientTransformationExtraArgs:
    r"""Descend with steps scaled by each parameter's curvature.

    .. math::
      m \leftarrow 0.9 m + 0.1 g, \qquad
      d_k^2 \leftarrow 0.97 d_k^2 + 0.03 \left(z_k (A D z)_k / D_{kk}\right)^2, \qquad
      u_k = -\frac{\eta_t}{d_k} m_k, \quad \eta_t = \frac{0.1}{1 + t / 100}

    with random signs z and :math:`D = \operatorname{diag}(d)^{-1/2}`, so that large curvatures do not
    hide a small one. No step is longer than 0.02 or 2 % of the parameter: without curvature it is about
    Adam's step, and the number of steps to a distant optimum grows with the logarithm of the distance.

    Args:
      axis_name: The mapped axes over which the batch is spread, if any.
    """

    def init(params: optax.Params) -> NewtonState:
        return NewtonState(jnp.zeros([], jnp.int32), wide_zeros(params), wide_zeros(params))

    def update(
        g: optax.Updates, state: NewtonState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, NewtonState]:
        def root(square: jax.Array) -> jax.Array:
            return jnp.where(square > 0, square, 1.0) ** 0.25

        # Hutchinson's estimate of the diagonal of A, in coordinates where it is about one
        z = computed_once(signs_like(fold(key_data(2), state.count), state.mean))
        probe = jax.tree.map(lambda z, s: z / root(s), z, state.square)
        batch = BatchGradients(params, g, extra_args, 1, None, axis_name)
        product = batch.curvature_product(probe)

        def mean(m: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.where(jnp.isfinite(g), 0.9 * m + 0.1 * g.astype(m.dtype), m)

        def square(s: jax.Array, z: jax.Array, a: jax.Array) -> jax.Array:
            new = jnp.square(z * a.astype(s.dtype) * root(s))
            rate = jnp.where(state.count == 0, 1.0, 0.03).astype(s.dtype)
            return jnp.where(jnp.isfinite(new), (1 - rate) * s + rate * new, s)

        following = NewtonState(
            optax.safe_increment(state.count),
            jax.tree.map(mean, state.mean, g),
            jax.tree.map(square, state.square, z, product),
        )
        eta = _RATE / (1 + state.count.astype(jnp.float32) / _HALVING)

        # u_k = -eta m_k / d_k
        def move(m: jax.Array, s: jax.Array, p: jax.Array) -> jax.Array:
            most = _LARGEST * jnp.maximum(jnp.abs(p.astype(m.dtype)), 1.0)
            u = -eta.astype(m.dtype) * m / jnp.sqrt(s)
            return jnp.where(m == 0, 0.0, jnp.clip(u, -most, most))

        return jax.tree.map(move, following.mean, following.square, params), following

    return transformation(
        init,
        update,
        method="constant_sgd",
        like=lambda state: state.mean,
        dtypes=False,
        needs={"grad_fn": "the gradient of the batch at given params"},
    )
