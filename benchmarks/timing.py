"""Seconds of calls, of one or of several in turns."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

Clock = Callable[[], float]


def seconds(call: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """The seconds of one call until its arrays are there, on the wall or by another clock."""
    start = clock()
    jax.block_until_ready(call())
    return clock() - start


def stepping(step: Callable[..., Any], carry: Any, *others: Any) -> Callable[[], Any]:
    """A call that takes one more step from what the last one returned, and may donate it."""

    def call() -> Any:
        nonlocal carry
        carry = step(*carry, *others)
        return carry

    return call


def take_turns(
    calls: Mapping[str, Callable[[], object]],
    repetitions: int,
    clock: Clock = time.perf_counter,
    *,
    warm_up: int = 3,
) -> dict[str, list[float]]:
    """The seconds of each call, after some rounds that do not count.

    The calls take turns, so that what else runs on the machine disturbs all of them.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warm_up + repetitions):
        for name, call in calls.items():
            times[name].append(seconds(call, clock))
    return {name: taken[warm_up:] for name, taken in times.items()}
