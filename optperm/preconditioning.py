"""What a method may ask of a preconditioner that is somewhere in the optimizer state."""

from typing import Protocol, runtime_checkable

import optax


@runtime_checkable
class PreconditioningState(Protocol):
    """A state of a transformation that multiplies gradients by a matrix H which it estimates."""

    def preconditioned(self, grads: optax.Updates) -> optax.Updates:
        """H g.

        Args:
          grads: g, a tree like the params, whole or without the leaves that this state does not see
            (`optax.MaskedNode` in their place): it leaves those out itself.

        Returns:
          A tree like the params that this state sees.
        """
        ...
