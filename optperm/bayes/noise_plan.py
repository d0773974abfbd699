"""Which step estimates what: the noise of the gradients, and how long steps may be."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from optperm.contract import checks

_FILLED_BURN_IN, _PLAIN_BURN_IN = 4000, 10
_LONGEST, _LEAST_OPEN = 2**31 - 1, 1000
# A Hessian-vector product is taken in every tenth step, but in a short burn-in more often.
_PROBE_EVERY, _PROBES = 10, 100
# One of the covariance of the noise takes longer, with those of the curvature that stand between.
_NOISE_EVERY = 4
# So often it is looked at again where C is constant.
_LOOK_EVERY = 200
# An estimate by the gradients of all examples takes as long as two steps: where there is time for so
# many after the burn-in, a fourth is enough.
_ESTIMATE_EVERY, _ENOUGH = 4, 1000


class Plan(NamedTuple):
    """What is due when.

    Attributes:
      burn_in: The first step that moves params.
      freeze_after: The first step from which on C is constant; None for never.
      estimate_after: The first step that estimates C.
      estimate_every: Steps from one estimate of C to the next.
      fill: Whether noise is filled in.
    """

    burn_in: int | jax.Array
    freeze_after: int | jax.Array | None
    estimate_after: int | jax.Array
    estimate_every: int | jax.Array
    fill: bool

    def estimates(self, count: jax.Array) -> jax.Array | bool:
        """Whether a step estimates C; a Python bool where all of them do."""
        every_step = checks.is_concrete_number(self.estimate_every) and self.estimate_every == 1
        from_start = checks.is_concrete_number(self.estimate_after) and self.estimate_after == 0
        if self.freeze_after is None and every_step and from_start:
            return True
        since = count - self.estimate_after
        return self._is_open(count) & (since % self.estimate_every == 0)

    def probes(self, count: jax.Array) -> jax.Array:
        """Whether a step looks at the largest eigenvalues."""
        if not self.fill or self.freeze_after is None:
            return self._takes_curvature(count)
        looks_again = self.is_frozen(count) & ((count - self.freeze_after) % _LOOK_EVERY == 0)
        return self._takes_curvature(count) | looks_again

    def is_frozen(self, count: jax.Array) -> jax.Array | bool:
        """Whether C is constant."""
        return False if self.freeze_after is None else count >= self.freeze_after

    def _takes_curvature(self, count: jax.Array) -> jax.Array:
        """Whether a step takes a Hessian-vector product."""
        is_due = (count - self.estimate_after) % self._period == 0
        if self.fill:
            return is_due & self._is_open(count)
        return (
            is_due & (count >= self.estimate_after) & (count < jnp.maximum(self.burn_in, _PROBES))
        )

    def probes_before(self, count: jax.Array) -> jax.Array:
        """How many of those were due before a step."""
        return (count - self.estimate_after) // self._period

    def probes_noise(self, count: jax.Array) -> jax.Array:
        """Whether a step that looks at eigenvalues looks at that of the noise."""
        return self.is_frozen(count) | (self.probes_before(count) % _NOISE_EVERY == 0)

    def probes_of_noise_before(self, count: jax.Array) -> jax.Array:
        """How many of those count for the noise, which is another one where the mean begins anew."""
        return (count - self._start(count)) // (self._period * _NOISE_EVERY)

    def factorizes(self, count: jax.Array) -> jax.Array | bool:
        """Whether a step makes the next one's factor of a full preconditioner anew."""
        if not self.fill:
            is_new = self.estimates(count) & (count + 1 >= self.burn_in)
            return is_new | self._takes_curvature(count)
        is_last = count + 1 == (_LONGEST if self.freeze_after is None else self.freeze_after)
        is_first = count + 1 == jnp.asarray(self.burn_in)
        return self._takes_curvature(count) | is_first | is_last

    def age(self, count: jax.Array) -> jax.Array:
        """Estimates before a step, by which later ones weigh less.

        With filled noise the mean begins anew where the burn-in ends, and after a quarter and a half of
        the steps from there until C is constant: a chain that is still on its way then has larger
        gradients, and so more noise, than where it samples. What came before counts as a few.
        """
        return (count - self._start(count)) // self.estimate_every

    def _start(self, count: jax.Array) -> jax.Array:
        """Where the mean of a step's estimates began."""
        start = jnp.asarray(self.estimate_after, jnp.int32)
        if not self.fill:
            return start
        burnt_in = jnp.maximum(jnp.asarray(self.burn_in, jnp.int32), start)
        left = jnp.zeros_like(burnt_in)
        if self.freeze_after is not None:
            left = jnp.asarray(self.freeze_after, jnp.int32) - burnt_in
        for anew in (burnt_in, burnt_in + left // 4, burnt_in + left // 2):
            start = jnp.where(count >= anew, anew, start)
        return start

    @property
    def _period(self) -> jax.Array:
        return jnp.clip(jnp.asarray(self.burn_in, jnp.int32) // _PROBES, 1, _PROBE_EVERY)

    def _is_open(self, count: jax.Array) -> jax.Array:
        return (count >= self.estimate_after) & jnp.logical_not(self.is_frozen(count))


def plan(
    burn_in: int | jax.Array | None,
    freeze_after: int | jax.Array | None,
    estimate_after: int | jax.Array | None,
    estimate_every: int | jax.Array | None,
    fill: bool,
    examples: int | jax.Array,
) -> Plan:
    """A plan from arguments, of which some have defaults that depend on others.

    Args:
      burn_in: As the plan's, or None for the default, like the next three.
      freeze_after: As the plan's.
      estimate_after: As the plan's.
      estimate_every: As the plan's.
      fill: Whether noise is filled in.
      examples: How many examples tell the variance of an entry in one estimate.

    Raises:
      TypeError: If an argument is of the wrong type.
      ValueError: If one is out of range, or C would be constant before it is used or estimated.
    """
    checks.check_flag("fill", fill)
    burn_in = (_FILLED_BURN_IN if fill else _PLAIN_BURN_IN) if burn_in is None else burn_in
    checks.check_count("burn_in", burn_in, minimum=0)
    if estimate_every is not None:
        checks.check_count("estimate_every", estimate_every)
    if estimate_after is None:
        estimate_after = burn_in // 2 if fill else 0
    checks.check_count("estimate_after", estimate_after, minimum=0)
    if freeze_after is None:
        freeze_after = _long_enough(burn_in) if fill else None
    else:
        checks.check_count("freeze_after", freeze_after)
        for name, least in (("burn_in", burn_in), ("estimate_after", estimate_after)):
            if all(map(checks.is_concrete_number, (freeze_after, least))) and freeze_after < least:
                raise ValueError(
                    f"freeze_after must be at least {name}, got freeze_after={freeze_after} and "
                    f"{name}={least}: the noise would be taken to be constant before it is known where "
                    "the chain samples."
                )
    if estimate_every is None:
        estimate_every = 1
        if fill and freeze_after is not None:
            estimate_every = _spared(freeze_after, burn_in, examples)
    return Plan(burn_in, freeze_after, estimate_after, estimate_every, bool(fill))


def _spared(
    freeze_after: int | jax.Array, burn_in: int | jax.Array, examples: int | jax.Array
) -> int:
    """Steps from one estimate to the next where fewer are enough."""
    if not all(map(checks.is_concrete_number, (freeze_after, burn_in, examples))):
        return 1
    most = int(examples) // 2, (int(freeze_after) - int(burn_in)) // _ENOUGH, _ESTIMATE_EVERY
    return max(min(most), 1)


def _long_enough(burn_in: int | jax.Array) -> int | jax.Array:
    """Twice the burn-in, but for enough estimates where that is short."""
    if checks.is_concrete_number(burn_in):
        return min(int(burn_in) + max(int(burn_in), _LEAST_OPEN), _LONGEST)
    return burn_in + jnp.maximum(burn_in, _LEAST_OPEN)


def examples_of_an_estimate(
    estimator: str, preconditioner: str, batch_size: int | jax.Array
) -> int | jax.Array:
    """How many examples tell the variance of an entry; 1 where they have to tell a matrix."""
    checks.check_count("batch_size", batch_size)
    return batch_size if estimator == "per_example" and preconditioner != "full" else 1
