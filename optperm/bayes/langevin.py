"""Stochastic gradient Langevin dynamics, without momentum and with it.

M. Welling and Y. W. Teh, "Bayesian Learning via Stochastic Gradient Langevin Dynamics", ICML 2011;
T. Chen, E. B. Fox and C. Guestrin, "Stochastic Gradient Hamiltonian Monte Carlo", ICML 2014.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.bayes.masters import with_masters
from optperm.bayes.normal_noise import fold, normal_like
from optperm.contract import checks
from optperm.contract.dtypes import accumulation_dtype
from optperm.contract.keys import key_data
from optperm.contract.mapped_axes import cond
from optperm.contract.schedules import resolve_schedule
from optperm.contract.shardings import can_be_seen, shard_like
from optperm.contract.states import find_states, mask_like
from optperm.contract.transformation import transformation

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Float32, Int32, PyTree, UInt32

# The share of steps that may meet a scaled or clipped gradient, how fast older ones are forgotten, and
# how often one is looked at.
_LARGEST_ALTERED, _SHARE_RATE, _LOOK_EVERY = 0.05, 0.02, 10


class SgldState(NamedTuple):
    r"""State of `sgld`.

    Attributes:
      count: Steps taken.
      key: The raw random key of the noise.
      reach: :math:`\epsilon T / 2` of the last step: over the posterior's variance in a direction it is
        the :math:`h \lambda` of that direction, by whose half variances are too large; 0 where a
        preconditioner makes it different everywhere.
      altered: Of late, the share of the steps whose gradient was the one of the extra arguments scaled
        or clipped; every tenth is looked at.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    key: UInt32[Array, "2"]
    reach: Float32[Array, ""]
    altered: Float32[Array, ""]


class SghmcState(NamedTuple):
    r"""State of `sghmc`.

    Attributes:
      count: Steps taken.
      velocity: :math:`v`, a tree like params, in float32 or wider.
      key: The raw random key of the noise.
      reach: :math:`\eta T / (2 - \alpha)` of the last step, for what `SgldState` has it for.
      altered: As in `SgldState`.
    """

    count: Int32[Array, ""]  # type: ignore[assignment]
    velocity: PyTree[Float[Array, "?*shape"], "Params"]
    key: UInt32[Array, "2"]
    reach: Float32[Array, ""]
    altered: Float32[Array, ""]


def sgld(
    step_size: optax.ScalarOrSchedule,
    num_data: int | jax.Array,
    temperature: optax.ScalarOrSchedule = 1.0,
    preconditioner: optax.Params | None = None,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient Langevin dynamics: half a step downhill, and noise.

    .. math::
      \theta_{t+1} = \theta_t - \frac{\epsilon}{2} N M g_t + \sqrt{\epsilon T} M^{1/2} \xi_t,
      \qquad \xi_t \sim N(0, I)

    with :math:`g_t` the gradient of the mean loss over a batch, the prior inside of it
    (`optperm.normal_prior`). The smaller :math:`\epsilon`, the nearer the iterates' distribution to the
    posterior: the noise of :math:`g_t` adds :math:`\epsilon N^2 M R / (4 T)` to each step's, where
    :math:`R` is its covariance. With `optperm.svrg` in front, :math:`R` is small near a snapshot (the
    control variates of Baker et al.). Clipping does not belong there: it changes the mean of the
    gradients too, and is warned of where the state is looked at. Nothing that scales the updates belongs
    behind it, which would be another temperature's: choose `step_size`. A schedule makes the steps fall,
    or fall again and again (cyclical SGLD).

    Each chain needs noise of its own: `optperm.draw_samples` sees to it; chains of your own take
    states that were initialized with different seeds.

    Args:
      step_size: :math:`\epsilon`, a number or a schedule of the step.
      num_data: N, the number of training examples.
      temperature: T, a number or a schedule of the step.
      preconditioner: The diagonal of :math:`M`, a tree like params of positive numbers; None for ones.
      seed: Seed of the noise. The key is in the state.

    Returns:
      A transformation whose state is an `SgldState`, beside a float32 copy of params of 16 bits. Entries
      whose gradient is not finite stay where they are.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range, or the preconditioner does not match the params.

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

    References:
      Welling and Teh, *Bayesian Learning via Stochastic Gradient Langevin Dynamics*, ICML 2011
    """
    _check(step_size, num_data, temperature, seed)
    if preconditioner is not None:
        checks.check_real_floating(
            "preconditioner", preconditioner, advice="Pass positive numbers."
        )
        for leaf in jax.tree.leaves(preconditioner):
            if not isinstance(leaf, jax.core.Tracer) and not np.all(np.asarray(leaf) > 0):
                raise ValueError("preconditioner must be above 0 in every entry.")

    def init(params: optax.Params) -> SgldState:
        if preconditioner is not None:
            checks.check_same_tree(
                "preconditioner", preconditioner, params, source="params", dtypes=False
            )
        return SgldState(jnp.zeros([], jnp.int32), key_data(seed), *_zeros())

    def update(
        g: optax.Updates, state: SgldState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, SgldState]:
        dtype = accumulation_dtype(params)
        epsilon = resolve_schedule("step_size", step_size, state.count, dtype)
        t = resolve_schedule("temperature", temperature, state.count, dtype)
        n = jnp.asarray(num_data, dtype)
        xi = normal_like(fold(state.key, state.count), params)
        m = jax.tree.map(jnp.ones_like, xi) if preconditioner is None else preconditioner

        # u = -epsilon / 2 N M g + sqrt(epsilon T) M^(1/2) xi
        def move(g: jax.Array, xi: jax.Array, m: jax.Array) -> jax.Array:
            m = shard_like(jnp.asarray(m, xi.dtype), xi)
            drift = (epsilon / 2 * n).astype(xi.dtype) * m * g.astype(xi.dtype)
            u = jnp.sqrt(epsilon * t).astype(xi.dtype) * jnp.sqrt(m) * xi - drift
            return jnp.where(jnp.isfinite(u), u, jnp.zeros_like(u))

        following = state._replace(
            count=optax.safe_increment(state.count),
            reach=(epsilon * t / 2 if preconditioner is None else 0 * epsilon).astype(jnp.float32),
            altered=_altered(state, g, extra_args.get("grad"), params),
        )
        warn_if_altered(following)
        return jax.tree.map(move, g, xi, m), following

    return with_masters(transformation(init, update, method="sgld"))


def sghmc(
    step_size: optax.ScalarOrSchedule,
    num_data: int | jax.Array,
    friction: float | jax.Array,
    temperature: optax.ScalarOrSchedule = 1.0,
    noise_estimate: float | jax.Array = 0.0,
    seed: int | jax.Array = 0,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient Hamiltonian Monte Carlo: momentum with friction, and the noise that it takes.

    .. math::
      v_{t+1} = (1 - \alpha) v_t - \eta N g_t + \sqrt{2 (\alpha - \hat\beta) \eta T} \, \xi_t, \qquad
      \theta_{t+1} = \theta_t + v_{t+1}, \qquad \xi_t \sim N(0, I)

    Chen et al.'s equation 15, with :math:`g_t` the gradient of the mean loss over a batch, the prior
    inside of it (`optperm.normal_prior`). :math:`\hat\beta` is the share of the friction that the noise
    of :math:`g_t` makes up for: :math:`\eta N^2 R / 2` where its covariance is :math:`R`.

    Each chain needs noise of its own: `optperm.draw_samples` sees to it; chains of your own take
    states that were initialized with different seeds.

    Args:
      step_size: :math:`\eta`, a number or a schedule of the step: the square of the leapfrog step.
      num_data: N, the number of training examples.
      friction: :math:`\alpha`, in (0, 1]: 1 less the decay of the momentum. Without any there is no
        stationary distribution.
      temperature: T, a number or a schedule of the step.
      noise_estimate: :math:`\hat\beta`, at most `friction`.
      seed: Seed of the noise. The key is in the state.

    Returns:
      A transformation whose state is an `SghmcState`, beside a float32 copy of params of 16 bits.
      Entries whose gradient is not finite stay where they are, and so does their velocity.

    Raises:
      TypeError: If an argument is of the wrong type, or a parameter is not of a real floating dtype.
      ValueError: If an argument is out of range.

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

    References:
      Chen, Fox and Guestrin, `Stochastic Gradient Hamiltonian Monte Carlo
      <https://arxiv.org/abs/1402.4102>`_, ICML 2014
    """
    _check(step_size, num_data, temperature, seed)
    checks.check_positive("friction", friction)
    checks.check_in_range("friction", friction, 0.0, 1.0, may_be_schedule=False)
    most = float(friction) if checks.is_concrete_number(friction) else 1.0
    checks.check_in_range(
        "noise_estimate",
        noise_estimate,
        0.0,
        most,
        may_be_schedule=False,
        advice="It is at most friction: take a smaller step_size or more friction.",
    )
    numbers = friction, noise_estimate

    def init(params: optax.Params) -> SghmcState:
        velocity = jax.tree.map(
            lambda p: shard_like(jnp.zeros_like(p, accumulation_dtype(p)), p), params
        )
        return SghmcState(jnp.zeros([], jnp.int32), velocity, key_data(seed), *_zeros())

    def update(
        g: optax.Updates, state: SghmcState, params: optax.Params, **extra_args: Any
    ) -> tuple[optax.Updates, SghmcState]:
        dtype = accumulation_dtype(params)
        eta = resolve_schedule("step_size", step_size, state.count, dtype)
        t = resolve_schedule("temperature", temperature, state.count, dtype)
        alpha, beta = (jnp.asarray(number, dtype) for number in numbers)
        drift = eta * jnp.asarray(num_data, dtype)
        deviation = jnp.sqrt(2 * (alpha - beta) * eta * t)
        xi = normal_like(fold(state.key, state.count), params)

        # v' = (1 - alpha) v - eta N g + sqrt(2 (alpha - beta) eta T) xi, u = v'
        def next_velocity(v: jax.Array, g: jax.Array, xi: jax.Array) -> jax.Array:
            kept = (1 - alpha).astype(v.dtype) * v + deviation.astype(v.dtype) * xi
            return kept - drift.astype(v.dtype) * g.astype(v.dtype)

        velocity = jax.tree.map(next_velocity, state.velocity, g, xi)
        u = jax.tree.map(lambda v: jnp.where(jnp.isfinite(v), v, jnp.zeros_like(v)), velocity)
        velocity = jax.tree.map(
            lambda v, old: jnp.where(jnp.isfinite(v), v, old), velocity, state.velocity
        )
        following = SghmcState(
            count=optax.safe_increment(state.count),
            velocity=velocity,
            key=state.key,
            reach=(eta * t / (2 - alpha)).astype(jnp.float32),
            altered=_altered(state, g, extra_args.get("grad"), params),
        )
        warn_if_altered(following)
        return u, following

    return with_masters(
        transformation(
            init, update, method="sghmc", like=lambda state: state.velocity, dtypes=False
        )
    )


def warn_if_altered(state: SgldState | SghmcState) -> None:
    """Gives the warnings of `faults_of`."""
    for fault in faults_of(state):
        warnings.warn(fault, stacklevel=3)


def faults_of(state: SgldState | SghmcState) -> list[str]:
    """What a state tells of gradients that something has scaled or clipped, a sentence each.

    Args:
      state: Of one chain or of several; nothing is said of a traced one.
    """
    if not can_be_seen(state.altered) or np.max(np.asarray(state.altered)) <= _LARGEST_ALTERED:
        return []
    return [
        "The gradients are scaled or clipped on their way to the sampler, which changes what it "
        "samples: leave out what stands in front of it. Control variates (svrg) may stand there."
    ]


# States of what makes other gradients of those before, but for those of svrg and its kin.
_MOMENTS = (
    optax.EmaState,
    optax.ScaleByAdamState,
    optax.ScaleByRmsState,
    optax.ScaleByRStdDevState,
    optax.TraceState,
)


def faults_in_front(opt_state: Any) -> list[str]:
    """What does not belong in front of a sampler in an `optax.chain`, a sentence each."""
    if not isinstance(opt_state, tuple | list | dict):
        return []
    children = list(opt_state.values() if isinstance(opt_state, dict) else opt_state)
    found = []
    if type(opt_state) is tuple:
        places = [
            i for i, each in enumerate(children) if find_states(each, (SgldState, SghmcState))
        ]
        before = children[: places[0]] if places else []
        found = [
            f"{type(state).__name__} stands in front of the sampler: of momentum, or of gradients that "
            "are scaled by their own past, it samples another law. Leave it out; sghmc has momentum, "
            "and sgld takes preconditioner=."
            for state in find_states(before, _MOMENTS)
        ]
    return found + [fault for child in children for fault in faults_in_front(child)]


def _zeros() -> tuple[jax.Array, jax.Array]:
    return jnp.zeros([], jnp.float32), jnp.zeros([], jnp.float32)


def _altered(
    state: SgldState | SghmcState, g: optax.Updates, grad: optax.Updates | None, params: Any
) -> jax.Array:
    """The running share of steps with a gradient that is the batch's own, but scaled or clipped.

    The very same arrays are not compared. Of a single number nothing can be told.
    """
    leaves = jax.tree.leaves(g)
    if grad is None or sum(map(jnp.size, leaves)) < 2:
        return state.altered
    others = jax.tree.leaves(mask_like(grad, params))
    if len(others) != len(leaves) or all(a is b for a, b in zip(leaves, others, strict=True)):
        return state.altered

    def look() -> jax.Array:
        found = _is_altered(leaves, others).astype(jnp.float32)
        return state.altered + _SHARE_RATE * (found - state.altered)

    return cond(state.count % _LOOK_EVERY == 0, look, lambda: state.altered)


def _is_altered(leaves: list[jax.Array], others: list[jax.Array]) -> jax.Array:
    """Whether some entries are the others' times one number, or all those that differ have one size."""
    dtype = accumulation_dtype(leaves)
    rounding = 8 * max(float(jnp.finfo(x.dtype).eps) for x in leaves)
    g = [x.astype(dtype) for x in leaves]
    grad = [shard_like(x, like).astype(dtype) for x, like in zip(others, leaves, strict=True)]

    def total(function: Callable[..., jax.Array]) -> jax.Array:
        parts = (jnp.sum(function(*pair), dtype=dtype) for pair in zip(g, grad, strict=True))
        return sum(parts, start=jnp.zeros([], dtype))

    # g = c grad
    size = total(lambda a, b: b * b)
    c = total(lambda a, b: a * b) / jnp.where(size > 0, size, 1.0)
    is_scaled = total(lambda a, b: (a - c * b) ** 2) <= rounding**2 * c**2 * size
    is_scaled &= jnp.abs(c - 1) > 0.01

    # |g_k| = max |g| wherever g_k is not grad_k
    most = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(a), initial=0.0) for a in g])
    strays = total(lambda a, b: (a != b) & ((jnp.abs(a) < most) | (jnp.abs(b) < most)))
    is_clipped = (strays == 0) & (total(lambda a, b: a != b) > 0)
    return (is_scaled | is_clipped) & (total(lambda a, b: (a != 0) | (b != 0)) > 1)


def _check(step_size: object, num_data: object, temperature: object, seed: object) -> None:
    checks.check_in_range("step_size", step_size, 0.0, float("inf"))
    checks.check_count("num_data", num_data)
    checks.check_in_range("temperature", temperature, 0.0, float("inf"))
    checks.check_seed("seed", seed)
