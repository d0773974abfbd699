"""Annotations of arrays with dtypes and shapes, in the notation of jaxtyping.

Type checkers and the tests read jaxtyping's own names. A user's program needs no jaxtyping: there, each
annotation is a `jax.Array`, and a tree of them is `Any`, so `typing.get_type_hints` works.
"""

from typing import TYPE_CHECKING, Any

import jax

__all__ = ["Array", "Bool", "Float", "Float32", "Int8", "Int32", "PyTree", "Shaped", "UInt32"]

if TYPE_CHECKING:
    from jaxtyping import Array, Bool, Float, Float32, Int8, Int32, PyTree, Shaped, UInt32
else:
    Array = jax.Array

    class Shaped:
        """An array of any dtype: `Shaped[Array, "rows columns"]`."""

        def __class_getitem__(cls, _: Any) -> Any:
            return jax.Array

    Bool = Float = Float32 = Int8 = Int32 = UInt32 = Shaped

    class PyTree:
        """A tree of arrays: `PyTree[Float[Array, "..."]]`."""

        def __class_getitem__(cls, _: Any) -> Any:
            return Any
