"""Every transformation of this library, one entry each; the contract and Optax's cases run on all.

A new one joins with one line here, and with what it must leave out of Optax's cases in
`conformance/test_optax.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

import optperm


@dataclasses.dataclass(frozen=True)
class Transformation:
    """One transformation and how to build it.

    Attributes:
      name: Its public name.
      factory: What builds it.
      arguments: The numbers to build it with.
      permutes: Whether it keeps the values of the params, in another order.
      lenient: Whether it wraps optimizers of Optax, which promote dtypes freely.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    arguments: Mapping[str, Any]
    permutes: bool = False
    lenient: bool = False

    def make(self) -> optax.GradientTransformationExtraArgs:
        return self.factory(**self.arguments)

    def __str__(self) -> str:
        return self.name


TRANSFORMATIONS = (
    Transformation("sgperm", optperm.sgperm, {"aggressiveness": 0.3}, permutes=True),
    Transformation(
        "permute_by_cycles",
        optperm.permute_by_cycles,
        {"aggressiveness": 0.3, "partition_ratio": 0.5},
        permutes=True,
    ),
    Transformation(
        "agn",
        optperm.agn,
        {"optimizer": optax.sgd(2e-3, 0.9), "communication_period": 2},
        lenient=True,
    ),
    Transformation(
        "diloco", optperm.diloco, {"inner": optax.sgd(1e-3), "sync_every": 2}, lenient=True
    ),
)
