"""Annotations of arrays with dtypes and shapes, in the notation of jaxtyping, and of trees of them.

Type checkers and the tests read jaxtyping's own names. A user's program needs no jaxtyping: there, each
annotation is a `jax.Array`, and a tree of them is `Any`, so `typing.get_type_hints` works.
"""

import functools
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import jax

__all__ = [
    "Array",
    "Bool",
    "Float",
    "Float32",
    "Int",
    "Int8",
    "Int32",
    "Params",
    "PyTree",
    "Shaped",
    "UInt32",
    "Updates",
]

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int, Int8, Int32, PyTree, Shaped, UInt32
    from optax import Params, Updates
else:
    Array = jax.Array
    # Optax's own names refer to themselves, and can be read in the module of chex alone.
    Params = Updates = Any

    class Shaped:
        """An array of any dtype: `Shaped[Array, "rows columns"]`."""

        def __class_getitem__(cls, _: Any) -> Any:
            return jax.Array

    Float = Float32 = Int = Int8 = Int32 = UInt32 = Shaped

    class Bool:
        """An array of booleans: `Bool[Array, "rows columns"]`."""

        def __class_getitem__(cls, _: Any) -> Any:
            return Annotated[jax.Array, bool]

    class PyTree:
        """A tree of arrays: `PyTree[Float[Array, "..."]]`."""

        def __class_getitem__(cls, item: Any) -> Any:
            kind = item[0] if isinstance(item, tuple) else item
            return Annotated[Any, bool] if get_origin(kind) is Annotated else Any


@functools.cache
def list_boolean_fields(kind: Any) -> tuple[str, ...]:
    """Return the names of the fields of a state of this library whose annotations say booleans."""
    # Annotations of other libraries may name types that exist only for type checkers.
    if kind.__module__.partition(".")[0] != __name__.partition(".")[0]:
        return ()
    hints = get_type_hints(kind, include_extras=True)
    return tuple(name for name, hint in hints.items() if bool in get_args(hint)[1:])
