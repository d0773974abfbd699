"""Parts of a tree of params: whole leaves, or slices of a leading axis, such as scanned layers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.contract.shardings import explicit_sharding

# A function of a leaf's path and the leaf, or a tree like params: the number of a leaf's fragment, or
# one for each slice of its leading axis.
FragmentOf: TypeAlias = Callable[[Any, Any], int | Sequence[int]] | Any


class Fragments:
    """A tree in so many parts."""

    def __init__(self, tree: Any, number: int, fragment_of: FragmentOf | None = None) -> None:
        """Divides the tree.

        Args:
          tree: The tree whose leaves are divided.
          number: How many parts.
          fragment_of: Which part a leaf or each of its slices belongs to. None makes runs of whole
            leaves of about equal size, some of which are empty where there are fewer leaves.
        """
        self.number = number
        self._structure: Any = jax.tree.structure(tree)
        if fragment_of is None:
            sizes = np.array([np.size(leaf) for leaf in jax.tree.leaves(tree)], float)
            middles = (np.cumsum(sizes) - sizes / 2) / max(float(sizes.sum()), 1.0)
            self._of: list[Any] = list(np.minimum((middles * number).astype(int), number - 1))
        else:
            self._of = _assigned(tree, number, fragment_of)

    def _map(self, function: Callable[..., Any], fragment: int, *trees: Any) -> Any:
        """Maps `function(rows, *leaves)` over leaves of a fragment; rows is None for a whole leaf."""
        columns = zip(*map(self._structure.flatten_up_to, trees), strict=True)
        out = []
        for of, leaves in zip(self._of, columns, strict=True):
            if not np.any(of == fragment):
                out.append(optax.MaskedNode())
                continue
            out.append(function(np.flatnonzero(of == fragment) if np.ndim(of) else None, *leaves))
        return jax.tree.unflatten(self._structure, out)

    def rows(self, tree: Any, fragment: int) -> Any:
        """The part of a tree, with `optax.MaskedNode` in the place of other leaves."""
        return self._map(
            lambda rows, leaf: leaf if rows is None else _at(leaf, rows), fragment, tree
        )

    def only(self, tree: Any, fragment: int) -> Any:
        """The leaves of a tree of which any slice is in the part, with all slices."""
        return self._map(lambda rows, leaf: leaf, fragment, tree)

    def put(self, tree: Any, part: Any, fragment: int) -> Any:
        """What `only` gives, with what `rows` gives in its place."""

        def write(rows: Any, leaf: Any, new: Any) -> Any:
            if rows is None:
                return new
            # As a selection, which is defined on all meshes. It runs in an exchange alone.
            order, is_new = np.zeros(len(leaf), int), np.zeros(len(leaf), bool)
            order[rows], is_new[rows] = np.arange(len(rows)), True
            return jnp.where(is_new.reshape(-1, *[1] * (leaf.ndim - 1)), _at(new, order), leaf)

        return self._map(write, fragment, tree, part)

    def replace(self, tree: Any, only: Any) -> Any:
        """The tree with the leaves of what `only` or `put` gives."""
        pairs = zip(*map(self._structure.flatten_up_to, (tree, only)), strict=True)
        leaves = [old if isinstance(new, optax.MaskedNode) else new for old, new in pairs]
        return jax.tree.unflatten(self._structure, leaves)

    def flags(self, values: Sequence[bool | jax.Array], like: Any) -> Any:
        """For each leaf the flag of its fragment, or False if none of its slices has another."""

        def of_leaf(of: Any, leaf: Any) -> bool | jax.Array:
            if not np.ndim(of):
                return values[int(of)]
            own = [values[p] for p in of]
            if all(each is False for each in own):
                return False
            return jnp.stack(_arrays(own)).reshape(-1, *[1] * (leaf.ndim - 1))

        leaves = zip(self._of, self._structure.flatten_up_to(like), strict=True)
        return jax.tree.unflatten(self._structure, [of_leaf(*pair) for pair in leaves])

    def table(self, values: Sequence[bool | jax.Array]) -> jax.Array:
        """The flag of each slice of each leaf, in a row for each leaf as long as the longest needs."""
        width = max([len(of) for of in self._of if np.ndim(of)], default=1)
        rows = [
            np.pad(of, (0, width - len(of))) if np.ndim(of) else np.full(width, of)
            for of in self._of
        ]
        return jnp.stack(_arrays(values))[np.array(rows, int).reshape(len(rows), width)]


def _assigned(tree: Any, number: int, fragment_of: FragmentOf) -> list[Any]:
    """The fragment of each leaf, or of each of its slices, as a user has named them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    structure: Any = jax.tree.structure(tree)
    if not leaves:
        return []
    if callable(fragment_of):
        given = [fragment_of(path, leaf) for path, leaf in leaves]
    else:
        try:
            given = structure.flatten_up_to(fragment_of)
        except ValueError as error:
            raise ValueError(f"fragment_of must be a tree like params: {error}") from error
    result = []
    for (path, leaf), each in zip(leaves, given, strict=True):
        name = f"fragment_of for params{jax.tree_util.keystr(path)}"
        of = np.asarray(each)
        if of.ndim > 1 or not np.issubdtype(of.dtype, np.integer):
            raise TypeError(
                f"{name} must be an integer, or one for each slice of the leading axis: {each!r}."
            )
        if of.ndim and (not np.ndim(leaf) or len(of) != len(leaf)):
            raise ValueError(
                f"{name} names {len(of)} slices, and the leaf is of shape {np.shape(leaf)}."
            )
        if of.size and not (of.min() >= 0 and of.max() < number):
            raise ValueError(
                f"{name} must lie in [0, {number}), the plan's fragments, got {each!r}."
            )
        result.append(of)
    missing = set(range(number)) - set(np.concatenate([of.reshape(-1) for of in result]).tolist())
    if missing:
        raise ValueError(f"fragment_of gives nothing to the plan's fragments {sorted(missing)}.")
    return result


def _arrays(values: Sequence[bool | jax.Array]) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.bool_) for value in values]


def _at(leaf: Any, rows: Any) -> Any:
    """Some rows of a leaf, the rest of whose axes lie as they did."""
    sharding = explicit_sharding(leaf)
    return leaf[rows] if sharding is None else leaf.at[rows].get(out_sharding=sharding)
