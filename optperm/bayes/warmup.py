"""The warm-up of constant SGD: when it learns what, and how it comes to an optimum."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.bayes.covariance import BatchGradients
from optperm.bayes.masters import with_masters
from optperm.bayes.normal_noise import fold, signs_like
from optperm.contract import checks
from optperm.contract.dtypes import wide_zeros
from optperm.contract.keys import key_data
from optperm.contract.mapped_axes import AxisName
from optperm.contract.schedules import resolve_schedule
from optperm.contract.transformation import transformation
from optperm.switching import switch_after

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Int32, PyTree

_LONGEST, _LEAST_OPEN = 2**31 - 1, 1000
# Of many examples' gradients an eighth of the estimates is enough.
_ESTIMATE_EVERY, _ENOUGH = 8, 500


class Warmup(NamedTuple):
    """The schedule of the warm-up.

    Attributes:
      burn_in: The first step that samples.
      freeze_after: The first step from which on nothing is learned.
      every: Steps from one estimate to the next.
    """

    burn_in: int | jax.Array
    freeze_after: int | jax.Array
    every: int | jax.Array

    def ends(self) -> tuple[jax.Array, ...]:
        """Return the start of the first window and the ends of all five.

        What a window learned is the kernel of the next one. The first two are in the second half of the
        burn-in, the first for the noise alone; the others end after a quarter, a half and all of the
        steps from the burn-in on. So the noise of the way to the optimum is forgotten.
        """
        first, last = (jnp.asarray(x, jnp.int32) for x in (self.burn_in, self.freeze_after))
        left = last - first
        return (
            first // 2, first - first // 4, first, first + left // 4, first + left // 2, last,
        )  # fmt: skip

    def is_open(self, count: jax.Array) -> jax.Array:
        """Return whether a step learns."""
        start, *_, last = self.ends()
        return (count >= start) & (count < last) & ((count - start) % self.every == 0)

    def number(self, count: jax.Array) -> jax.Array:
        """Return how many estimates came before a step in its window."""
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
    """Return the schedule that `optperm.constant_sgd` follows.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If one is out of range, or nothing would be learned where the chain samples.
    """
    checks.check_count("burn_in", burn_in, minimum=0)
    are_seen = checks.is_concrete_number(burn_in)
    if freeze_after is None:
        left = max(int(burn_in), _LEAST_OPEN) if are_seen else jnp.maximum(burn_in, _LEAST_OPEN)
        freeze_after = min(int(burn_in) + left, _LONGEST) if are_seen else burn_in + left
    checks.check_count("freeze_after", freeze_after)
    are_seen = are_seen and checks.is_concrete_number(freeze_after)
    # Without a burn-in one window learns the noise and another one the curvature
    if are_seen and int(freeze_after) < max(int(burn_in) + 1, 2):
        raise ValueError(
            f"freeze_after must be above burn_in and at least 2, got {freeze_after} and {burn_in}."
        )
    every = 1
    if are_seen and estimator == "per_example" and preconditioner in ("scalar", "diagonal"):
        is_seen = checks.is_concrete_number(batch_size)
        enough = (int(freeze_after) - int(burn_in)) // _ENOUGH
        every = max(1, min(int(batch_size) // 2 if is_seen else 1, enough, _ESTIMATE_EVERY))
    return Warmup(burn_in, freeze_after, every)


def after_burn_in(
    burn_in: int | jax.Array,
    burn_in_optimizer: optax.GradientTransformation,
    *steps: optax.GradientTransformation,
    **schedules: optax.ScalarOrSchedule,
) -> optax.GradientTransformationExtraArgs:
    """Return the steps of a sampler, which another optimizer moves to an optimum in the burn-in.

    Args:
      burn_in: For how many steps.
      burn_in_optimizer: That optimizer.
      *steps: The sampler's, which see the burn-in too.
      **schedules: Its schedules by their names. In the conditional of the burn-in they are traced, so
        that one which is out of range has to be named here.
    """
    checks.check_transformation("burn_in_optimizer", burn_in_optimizer)
    inner = switch_after(burn_in, burn_in_optimizer, optax.chain(*steps), track=True)

    def update(
        g: optax.Updates, state: Any, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, Any]:
        found = inner.update(g, state, params, **extra_args)
        for name, schedule in schedules.items():
            resolve_schedule(name, schedule, state.count)
        return found

    return with_masters(transformation(inner.init, update, method="constant_sgd", is_wrapper=True))


class NewtonState(NamedTuple):
    r"""State of `diagonal_newton`.

    Attributes:
      count: Steps taken.
      mean: The running mean of the gradients, a tree like params.
      square: The running mean of the square of each entry's curvature.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    mean: PyTree[Float[Array, "?*shape"], "Params"]
    square: PyTree[Float[Array, "?*shape"], "Params"]


_RATE, _HALVING, _LARGEST = 0.1, 100.0, 0.02


def diagonal_newton(axis_name: AxisName | None = None) -> optax.GradientTransformationExtraArgs:
    r"""Descend by each parameter's own curvature, whatever the units of the features.

    .. math::
      m \leftarrow .9 m + .1 g, \qquad
      d_k^2 \leftarrow .97 d_k^2 + .03 \left(z_k (A D z)_k / D_{kk}\right)^2, \qquad
      u_k = -\frac{\eta_t}{d_k} m_k, \quad \eta_t = \frac{.1}{1 + t / 100}

    with z of random signs and :math:`D = \operatorname{diag}(d)^{-1/2}`, so that an entry of small
    curvature is not lost among the others. No step is longer than .02, or 2 % of the parameter: where
    curvature vanishes it is about Adam's, and what lies far away is still reached in the logarithm of
    its distance.

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

        # D z, and its product with A
        z = signs_like(fold(key_data(2), state.count), state.mean)
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
