"""Find all methods within an optimizer that exchange params, for a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import optax

from optperm.core.shapes import Params
from optperm.distributed._replicas import Replicas


class Method(NamedTuple):
    """A method that exchanges params.

    Attributes:
      name: The public name of the method.
      tx: The transformation.
      params: The params that the method trains, which may be a part of the model's params.
      replicas: The mapped axes.
      every: The period or plan of the method.
    """

    name: str
    tx: optax.GradientTransformationExtraArgs
    params: Params
    replicas: Replicas
    every: Any


Look = Callable[[Method], None]
_LOOK: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def look_at_methods(look: Look | None) -> Iterator[None]:
    """Call `look` with each method whose `init` is called within the context; None for no call."""
    token = _LOOK.set(look)
    try:
        yield
    finally:
        _LOOK.reset(token)


def show(
    name: str, tx: optax.GradientTransformationExtraArgs, replicas: Replicas, every: Any
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation whose `init` also passes the method to the current report, if any."""

    def init(params: Params) -> Any:
        look = _LOOK.get()
        if look is not None:
            look(Method(name, tx, params, replicas, every))
        return tx.init(params)

    return tx._replace(init=init)
