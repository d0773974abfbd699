"""Methods whose state holds a preconditioner that others may use."""

from typing import Protocol, runtime_checkable

import optax


@runtime_checkable
class PreconditioningState(Protocol):
    """A state of a transformation that multiplies gradients by a matrix H of its own."""

    def preconditioned(self, grads: optax.Updates) -> optax.Updates:
        """H times the gradients, by the newest H."""
        ...
