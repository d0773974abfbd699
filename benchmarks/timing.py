"""Seconds of calls, of one or of several in turns, on a machine on which nothing else runs."""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import results

Clock = Callable[[], float]
MAX_LOAD, MAX_RATIO = 0.5, 2.0
# The load before the benchmark itself adds to it: programs that ran on average in the last minute.
LOAD = os.getloadavg()[0]


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Measure times inside; end the benchmark if other programs ran, unless it has `--loaded`."""
    _require(LOAD <= MAX_LOAD, f"the load was {LOAD:.2f} at the start, above {MAX_LOAD}")
    wall, processor = time.perf_counter(), time.process_time()
    yield
    ratio = (time.perf_counter() - wall) / max(time.process_time() - processor, 1e-9)
    # On other devices, the processor waits for the device.
    is_quiet = jax.default_backend() != "cpu" or ratio <= MAX_RATIO
    _require(is_quiet, f"the wall time was {ratio:.1f} times the processor time, above {MAX_RATIO}")


def _require(is_quiet: bool, seen: str) -> None:
    """End the benchmark with a sentence, unless the machine is quiet or the command says it is not."""
    if not is_quiet and not results.is_loaded():
        raise SystemExit(
            f"Other programs ran on this machine: {seen}. Wait until they end, or pass --loaded: "
            "the file of --json then says so."
        )


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
    with undisturbed():
        for _ in range(warm_up + repetitions):
            for name, call in calls.items():
                times[name].append(seconds(call, clock))
    return {name: taken[warm_up:] for name, taken in times.items()}
