"""A report on the size of an optimizer's state, leaf by leaf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optperm.core import checks
from optperm.core.shapes import Params
from optperm.core.states import find_states, match_params
from optperm.core.tables import align
from optperm.memory._apollo import ApolloState
from optperm.memory._low_rank import LowRankState
from optperm.memory._moments import decode_states


class LeafReport(NamedTuple):
    """The entry of one leaf in `optperm.memory.state_report`.

    Attributes:
      name: The path of the leaf.
      shape: The shape of the leaf.
      treatment: The treatment of the leaf by a low-rank method; empty without such a method.
      words: The number of words in the leaf's state.
      words_per_param: The number of words per entry of the leaf.
    """

    name: str
    shape: tuple[int, ...]
    treatment: str
    words: float
    words_per_param: float

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the leaf's state."""
        return round(4 * self.words)


class StateReport(NamedTuple):
    """Result of `state_report`; it prints as a table.

    Attributes:
      leaves: For each leaf, in the order of the tree: `name` (its path), `shape`, `treatment`, `words`
        of its state, `bytes`, and `words_per_param` (the words per entry). `treatment` is "full
        rank", perhaps with "axes not named", or for example "rank 4 of 16 x 64" for 16 x 64 matrices
        whose side of 16 is projected. It is empty without a low-rank method.
      other_words: The words of arrays that do not belong to a leaf, such as counts and keys.
      words: The words of the whole state. `bytes` is four times this number.
      words_per_param: The words of the whole state per parameter.
    """

    leaves: tuple[LeafReport, ...]
    other_words: float
    words: float
    words_per_param: float

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the whole state."""
        return round(4 * self.words)

    def __str__(self) -> str:
        """Return the table, with a line for each leaf, one for other arrays and one for the sum."""
        lines = [("leaf", "shape", "low rank", "bytes", "words", "words/param")]
        for leaf in self.leaves:
            numbers = f"{leaf.bytes}", f"{leaf.words:.10g}", f"{leaf.words_per_param:.2f}"
            lines.append((leaf.name or "params", str(leaf.shape), leaf.treatment, *numbers))
        others = f"{round(4 * self.other_words)}", f"{self.other_words:.10g}"
        lines.append(("others", "", "", *others, ""))
        numbers = f"{self.bytes}", f"{self.words:.10g}", f"{self.words_per_param:.2f}"
        lines.append(("all", "", "", *numbers))
        # Leave out the column of treatments if it is empty
        columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
        return align(zip(*columns, strict=True))


def state_report(tx: optax.GradientTransformation, params: Params) -> StateReport:
    """Report the size of an optimizer's state in bytes and in 32-bit words, leaf by leaf.

    The report needs only shapes. A word is four bytes, so an entry of an int8 array or of a mask is a
    quarter of a word. An array belongs to a leaf if it is in a tree like params. The line "others"
    includes the exponents of `optperm.quantize_state`, one byte for up to 32 codes. If the
    optimizer contains `optperm.low_rank` or `optperm.apollo`, the report shows the rank of each leaf. A
    leaf with three or more axes at full rank is marked "axes not named".

    Args:
      tx: Any optimizer.
      params: The model's params, or their shapes from `jax.eval_shape`.

    Returns:
      A `StateReport`; it prints as a table.

    Example:
      >>> import jax.numpy as jnp, optax, optperm
      >>> params = {"bias": jnp.zeros(64), "kernel": jnp.zeros((64, 256))}
      >>> print(optperm.memory.state_report(optax.scale_by_adam(), params))
      leaf        shape      bytes   words  words/param
      ['bias']    (64,)      512     128    2.00
      ['kernel']  (64, 256)  131072  32768  2.00
      others                 4       1
      all                    131588  32897  2.00
      >>> tx = optperm.low_rank(optax.scale_by_adam(), 1 / 4)
      >>> print(optperm.memory.state_report(tx, params))
      leaf        shape      low rank             bytes  words    words/param
      ['bias']    (64,)      full rank            524    131      2.05
      ['kernel']  (64, 256)  rank 16 of 64 x 256  36872  9218     0.56
      others                                      25     6.25
      all                                         37421  9355.25  0.57

    Raises:
      TypeError: If `tx` is not a transformation.
    """
    checks.check_transformation("tx", tx)
    treatments: dict[int, str] = {}

    def init(params: Params) -> Any:
        state = tx.init(params)
        # Codes of 4 bits are in arrays of half the length
        treatments.update(_find_treatments(decode_states(state), params))
        return state

    state = jax.eval_shape(init, params)
    paths = jax.tree_util.tree_leaves_with_path(params)
    words, other_words = [0.0] * len(paths), 0.0
    for leaf, place, _ in match_params(state, params):
        if place is None:
            other_words += _count_words(leaf)
        else:
            words[place] += _count_words(leaf)
    leaves = []
    for place, ((path, leaf), own) in enumerate(zip(paths, words, strict=True)):
        name, ratio = jax.tree_util.keystr(path), own / max(math.prod(jnp.shape(leaf)), 1)
        leaves.append(LeafReport(name, jnp.shape(leaf), treatments.get(place, ""), own, ratio))
    total, size = sum(words, other_words), sum(math.prod(jnp.shape(leaf)) for _, leaf in paths)
    return StateReport(tuple(leaves), other_words, total, total / max(size, 1))


def _count_words(leaf: jax.ShapeDtypeStruct) -> float:
    return leaf.size * leaf.dtype.itemsize / 4


def _find_treatments(state: Any, params: Params) -> Iterator[tuple[int, str]]:
    """Yield the positions of the leaves in low-rank methods, and the treatment of each leaf."""
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(params)]
    methods: tuple[type[Any], ...] = (LowRankState, ApolloState)
    # If the params are a single array, `match_params` finds no leaf for an array without axes
    lone = 0 if jax.tree_util.all_leaves([params]) else None

    def match(tree: Any) -> list[tuple[Any, int | None]]:
        found = match_params(tree, params)
        return [(leaf, lone if place is None else place) for leaf, place, _ in found]

    for method in find_states(state, methods):
        is_stored = isinstance(method, LowRankState)
        # r is known from a basis (..., d, r) or from moments, (..., r, k) or (..., k, r), of APOLLO
        arrays = method.basis if is_stored else method.inner_state
        batches = {place: leaf.shape for leaf, place in match(method.norm)}
        for array, place in match(arrays):
            if place is None:
                continue
            shape, batch = shapes[place], batches[place]
            if array.shape == shape or (is_stored and not array.ndim):
                yield place, "full rank" + ", axes not named" * (len(shape) > 2)
            elif array.shape[:-2] == batch and array.ndim == len(batch) + 2:
                # The rank is smaller than both sides.
                r, side = sorted(array.shape[-2:])
                other = math.prod(shape) // max(math.prod(batch) * side, 1)
                sides = (side, other) if is_stored else (other, side)
                yield place, f"rank {r} of " + " x ".join(map(str, (*batch, *sides)))
