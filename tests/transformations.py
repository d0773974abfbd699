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
      places: Whether it places params on targets, so that `optperm.apply_updates` is exact for it.
    """

    name: str
    factory: Callable[..., optax.GradientTransformationExtraArgs]
    arguments: Mapping[str, Any]
    places: bool = False

    def make(self) -> optax.GradientTransformationExtraArgs:
        return self.factory(**self.arguments)

    def __str__(self) -> str:
        return self.name


TRANSFORMATIONS = (
    Transformation("sgperm", optperm.sgperm, {"aggressiveness": 0.3}, places=True),
    Transformation(
        "permute_by_cycles",
        optperm.permute_by_cycles,
        {"aggressiveness": 0.3, "partition_ratio": 0.5},
        places=True,
    ),
)
