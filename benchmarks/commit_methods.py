"""Methods for the byte transformer: in step, alone, and with rare commits, each with its grid."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import optax

import optperm

AXIS, PERIOD, RATE = "replica", 10, 3e-3
RATES = 1.5e-3, 3e-3, 6e-3, 1.2e-2
MUON_RATES = 5e-3, 1.5e-2, 4.5e-2
OUTER = {
    "SGD 1": lambda: optax.sgd(1.0),
    "Nesterov 0.8, 0.5": lambda: None,  # what diloco takes by default
    "Nesterov 0.9, 0.8": lambda: optax.sgd(0.9, momentum=0.8, nesterov=True),
    "Nesterov 0.7, 0.9": lambda: optax.sgd(0.7, momentum=0.9, nesterov=True),
}


class Method(NamedTuple):
    """A way to train, what it was tried with, and the best of that.

    Attributes:
      make: From a point of the grid to what trains, and when fragments are exchanged.
      grid: The points, each the rate of the replicas, and of a center its rate or optimizer.
      best: The one with the lowest loss, after 400 steps from 200 common ones.
    """

    make: Callable[..., tuple[Any, optperm.distributed.Every | None]]
    grid: list[tuple[Any, ...]]
    best: tuple[Any, ...]


def adamw(rate: float, steps: int | None = None) -> optax.GradientTransformation:
    """AdamW with a constant rate, or with a cosine over so many steps."""
    rates = rate if steps is None else optax.cosine_decay_schedule(rate, steps, 0.05)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.01))


def muon(rate: float, steps: int) -> optax.GradientTransformation:
    """Muon with a cosine over so many steps, and Adam for all that is no matrix."""
    fall = optax.cosine_decay_schedule(1.0, steps, 0.05)
    return optax.contrib.muon(lambda t: rate * fall(t), adam_learning_rate=lambda t: RATE * fall(t))


def methods(steps: int) -> dict[str, Method]:
    """Those that are compared, each with what it needs for so many steps."""
    whole, parts = (
        optperm.distributed.Every(PERIOD),
        optperm.distributed.Every(PERIOD, fragments=4, delay=1),
    )

    def plain(rate: float, make: Callable[..., Any] = adamw) -> Any:
        return make(rate, steps), None

    def agn(rate: float, center_rate: float) -> Any:
        center = adamw(center_rate, steps)
        tx = optperm.agn(adamw(rate, steps), every=PERIOD, axis_name=AXIS, outer=center)
        return tx, whole

    def diloco(
        rate: float,
        outer: str,
        plan: optperm.distributed.Every = whole,
        make: Callable[..., Any] = adamw,
        **options: Any,
    ) -> Any:
        tx = optperm.diloco(
            make(rate, steps), OUTER[outer](), every=plan, axis_name=AXIS, **options
        )
        return tx, plan

    few, four = (
        optperm.distributed.Compression(1 / 16, bits=2),
        optperm.distributed.Compression(bits=4),
    )
    rates, muon_rates = ([(rate,) for rate in each] for each in (RATES, MUON_RATES))
    centers, outer = (
        list(itertools.product(RATES, (1e-2, 3e-2))),
        list(itertools.product(RATES, OUTER)),
    )
    streamed = functools.partial(diloco, plan=parts, mixing=0.5)
    with_outer = list(itertools.product(MUON_RATES, OUTER))
    with_muon = functools.partial(diloco, make=muon)
    return {
        "in step": Method(plain, rates, (6e-3,)),
        "alone": Method(plain, rates, (3e-3,)),
        "agn": Method(agn, centers, (3e-3, 1e-2)),
        "diloco": Method(diloco, outer, (6e-3, "Nesterov 0.8, 0.5")),
        "streaming": Method(streamed, outer, (3e-3, "Nesterov 0.7, 0.9")),
        "4 bits": Method(
            functools.partial(diloco, compress=four), outer, (6e-3, "Nesterov 0.8, 0.5")
        ),
        "top 1/16, 2 bits": Method(
            functools.partial(diloco, compress=few), outer, (6e-3, "Nesterov 0.8, 0.5")
        ),
        "Muon in step": Method(functools.partial(plain, make=muon), muon_rates, (1.5e-2,)),
        "MuLoCo": Method(with_muon, with_outer, (1.5e-2, "Nesterov 0.8, 0.5")),
    }
