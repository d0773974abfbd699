"""Find the axes of a leaf that form a matrix, for layers of Flax, Equinox and JAX."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from optax.contrib import GaLoreDimensionNumbers

from optperm.core.tables import align
from optperm.core.trees import without_boxes

# Only these names have an effect, if they are whole elements of paths as in Flax's linen and nnx.
_OF_ATTENTION = {  # the element above `kernel`, and the kernel's last axes
    "query": GaLoreDimensionNumbers(-3, (-2, -1)),  # d, heads, head_dim
    "key": GaLoreDimensionNumbers(-3, (-2, -1)),
    "value": GaLoreDimensionNumbers(-3, (-2, -1)),
    "out": GaLoreDimensionNumbers((-3, -2), -1),  # heads, head_dim, d
}
_NO_MATRICES = ("embedding", "bias", "scale")
# The maximum side of a convolution's window
_LONGEST_SIDE = 16


class _Taken(NamedTuple):
    """The assumed kind of a leaf, and the axes of its matrices; None for full rank."""

    kind: str
    numbers: GaLoreDimensionNumbers | None


def matrix_axes(params: optax.Params, **overrides: GaLoreDimensionNumbers | None) -> optax.Params:
    r"""Find the axes that make each leaf a matrix, print them, and return them.

    - A leaf with two axes is a matrix.
    - A `kernel` in `query`, `key` or `value` with the axes (d, heads, head_dim) is a d x (heads *
      head_dim) matrix. A `kernel` in `out` is a (heads * head_dim) x d matrix. Axes before these index a
      stack of matrices.
    - A leaf with four or more axes is a convolution if all axes except the last two (Flax, outputs last)
      or the first two (Equinox, outputs first) form a window. The sides of a window are at most 16, and
      are equal except for sides of 1. If both candidates are windows, the smaller window counts. One
      side of the matrix is the outputs, and the other side consists of all other axes.
    - All other leaves stay at full rank, and so do `embedding`, `bias` and `scale`.

    A name matches only a whole element of a path, as in Flax's linen and nnx.

    Args:
      params: The model's params, or their shapes from `jax.eval_shape`.
      **overrides: For an element of a path, the axes of all leaves below this element, or None for full
        rank.

    Returns:
      A tree like params with an `optax.contrib.GaLoreDimensionNumbers` for each leaf, or None for full
      rank. Pass the tree as `dimension_numbers` to `optperm.low_rank` or `optperm.apollo`. By
      default, they use the tree without overrides, for leaves whose state shrinks.

    Example:
      >>> import jax.numpy as jnp, optperm
      >>> query = {"kernel": jnp.ones((64, 4, 16)), "bias": jnp.ones((4, 16))}
      >>> params = {"query": query, "wte": jnp.ones((500, 64))}
      >>> axes = optperm.memory.matrix_axes(params, wte=None)
      leaf                 shape        matrices  taken for
      ['query']['bias']    (4, 16)      -         bias
      ['query']['kernel']  (64, 4, 16)  64 x 64   attention
      ['wte']              (500, 64)    -         as given for wte
      >>> axes["query"]["kernel"]
      GaLoreDimensionNumbers(reduction_axis=-3, output_axis=(-2, -1))

    Notes:
      In a model that is scanned over its layers, the first axis of an attention kernel indexes the
      layers, and each layer has its own matrix. Any other leaf with three axes stays at full rank,
      because it may be a stack of matrices along any axis. To project such a leaf, name its axes. Also
      pass overrides for leaves that only look like a matrix or a convolution: Equinox's `Embedding`,
      tables of positions, norms and biases of scanned layers, and stacks such as (4, 4, 64, 256) for
      four layers with four experts.

    Raises:
      TypeError: If an override is neither a `GaLoreDimensionNumbers` nor None.
      ValueError: If an override does not name an element of a path.
    """
    paths = jax.tree_util.tree_leaves_with_path(without_boxes(params))
    elements = {name for path, _ in paths for name in _names(path)}
    for name, numbers in overrides.items():
        if numbers is not None and not isinstance(numbers, GaLoreDimensionNumbers):
            wanted = "an optax.contrib.GaLoreDimensionNumbers or None"
            raise TypeError(f"{name} must be {wanted}, got {numbers!r}.")
        if name not in elements:
            raise ValueError(f"{name} must be an element of a path, one of {sorted(elements)}.")
    taken = [_take(path, jnp.shape(leaf), overrides) for path, leaf in paths]
    lines = [("leaf", "shape", "matrices", "taken for")]
    for (path, leaf), (kind, numbers) in zip(paths, taken, strict=True):
        shape = jnp.shape(leaf)
        name = jax.tree_util.keystr(path) or "params"
        lines.append((name, str(shape), _describe(shape, numbers), kind))
    print(align(lines))
    structure: Any = jax.tree.structure(params)
    return structure.unflatten(numbers for _, numbers in taken)


def find_matrix_axes(params: optax.Params) -> optax.Params:
    """Return the tree of `matrix_axes` without printing, for params without variables."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: _take(path, jnp.shape(leaf), {}).numbers, params
    )


def _take(path: tuple[Any, ...], shape: tuple[int, ...], overrides: dict[str, Any]) -> _Taken:
    names = _names(path)
    given = [name for name in names if name in overrides]
    last, above = (*reversed(names), "", "")[:2]
    taken = _Taken("full rank", None)
    if 0 in shape:
        taken = _Taken("empty", None)
    elif given:
        taken = _Taken(f"as given for {given[-1]}", overrides[given[-1]])
    elif last in _NO_MATRICES:
        taken = _Taken(last, None)
    elif last == "kernel" and above in _OF_ATTENTION and len(shape) >= 3:
        taken = _Taken("attention", _OF_ATTENTION[above])
    elif len(shape) == 2:
        taken = _Taken("matrix", GaLoreDimensionNumbers(0, 1))
    elif len(shape) > 3:
        axes = tuple(range(len(shape)))
        windows = [each for each in (shape[:-2], shape[2:]) if _is_window(each)]
        if windows:
            is_flax = min(windows, key=math.prod) == shape[:-2]
            rows, outputs = (axes[:-1], axes[-1]) if is_flax else (axes[1:], axes[0])
            taken = _Taken("convolution", GaLoreDimensionNumbers(rows, outputs))
    return taken


def _is_window(sides: tuple[int, ...]) -> bool:
    return max(sides) <= _LONGEST_SIDE and len(set(sides) - {1}) <= 1


def _names(path: tuple[Any, ...]) -> list[str]:
    """Return the elements of a path."""
    names = []
    for key in path:
        match key:
            case DictKey(key=name) | FlattenedIndexKey(key=name) | GetAttrKey(name=name):
                names.append(str(name))
            case SequenceKey(idx=index):
                names.append(str(index))
    return names


def _describe(shape: tuple[int, ...], numbers: GaLoreDimensionNumbers | None) -> str:
    """Return a description of a leaf's matrices: the axes of a stack, if any, and the two sides."""
    if numbers is None:
        return "-"
    given = (numbers.reduction_axis, numbers.output_axis)
    rows, columns = (
        [axis % len(shape) for axis in ((axes,) if isinstance(axes, int) else axes)]
        for axes in given
    )
    stack = [shape[axis] for axis in range(len(shape)) if axis not in (*rows, *columns)]
    sides = [math.prod(shape[axis] for axis in side) for side in (rows, columns)]
    return " x ".join(map(str, (*stack, *sides)))
