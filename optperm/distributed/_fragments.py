"""Divide params into fragments: whole leaves, or slices of a leading axis, such as scanned layers."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optperm.core.shardings import explicit_sharding, shard_like
from optperm.core.trees import is_function, mask_like, unstack, without_boxes

# A function of a path and a leaf, or a tree like params. The values are the fragment of a leaf, or a
# sequence with the fragment of each slice of the leaf's leading axis.
FragmentOf: TypeAlias = Callable[[Any, Any], int | Sequence[int]] | Any


class Fragments:
    """The division of trees like params into fragments.

    Attributes:
      number: The number of fragments.
      of: The fragment of each leaf, or an array with the fragment of each of its slices.
    """

    def __init__(self, tree: Any, number: int, fragment_of: FragmentOf | None = None) -> None:
        """Assign the leaves of the tree to fragments.

        Args:
          tree: The tree.
          number: The number of fragments.
          fragment_of: The fragment of a leaf or of each of its slices. None to group successive whole
            leaves into fragments of about equal size; with few leaves, some fragments are empty.
        """
        self.number = number
        self._structure: Any = jax.tree.structure(tree)
        if fragment_of is None:
            # Leaf l is in fragment floor(P x), where x is the relative position of its middle entry.
            sizes = np.array([np.size(leaf) for leaf in jax.tree.leaves(tree)], float)
            middles = (np.cumsum(sizes) - sizes / 2) / max(float(sizes.sum()), 1.0)
            self.of: list[Any] = list(np.minimum((middles * number).astype(int), number - 1))
        else:
            self.of = _assign(tree, number, fragment_of)

    def _map(self, function: Callable[..., Any], fragment: int, *trees: Any) -> Any:
        """Map `function(rows, *leaves)` over the leaves of a fragment; rows is None for a whole leaf."""
        columns = zip(*map(self._structure.flatten_up_to, trees), strict=True)
        out = []
        for of, leaves in zip(self.of, columns, strict=True):
            if not np.any(of == fragment):
                out.append(optax.MaskedNode())
                continue
            out.append(function(np.flatnonzero(of == fragment) if np.ndim(of) else None, *leaves))
        return jax.tree.unflatten(self._structure, out)

    def take_rows(self, tree: Any, fragment: int) -> Any:
        """Return a fragment of a tree, with `optax.MaskedNode` for other leaves."""
        return self._map(
            lambda rows, leaf: leaf if rows is None else _take(leaf, rows), fragment, tree
        )

    def take_leaves(self, tree: Any, fragment: int) -> Any:
        """Return the whole leaves that have slices in a fragment, with `optax.MaskedNode` for others.

        `()`, which replaces a tree that a state does not have, is returned unchanged.
        """
        if isinstance(tree, tuple) and not tree:
            return tree
        return self._map(lambda rows, leaf: leaf, fragment, tree)

    def write_rows(self, tree: Any, part: Any, fragment: int) -> Any:
        """Write the rows of a result of `take_rows` into a result of `take_leaves`."""

        def write(rows: Any, leaf: Any, new: Any) -> Any:
            if rows is None:
                return new
            # Unlike a scatter, a selection works on all meshes. It runs only in exchanges.
            order, is_new = np.zeros(len(leaf), int), np.zeros(len(leaf), bool)
            order[rows], is_new[rows] = np.arange(len(rows)), True
            return jnp.where(is_new.reshape(-1, *[1] * (leaf.ndim - 1)), _take(new, order), leaf)

        return self._map(write, fragment, tree, part)

    def replace_leaves(self, tree: Any, part: Any) -> Any:
        """Return the tree with the leaves of a result of `take_leaves` or `write_rows`."""
        if isinstance(part, tuple) and not part:
            return tree
        pairs = zip(*map(self._structure.flatten_up_to, (tree, part)), strict=True)
        leaves = [old if isinstance(new, optax.MaskedNode) else new for old, new in pairs]
        return jax.tree.unflatten(self._structure, leaves)

    def spread_flags(self, values: Sequence[bool | jax.Array]) -> Any:
        """Return the flag of each leaf's fragment, or a vector with the flags of the leaf's slices."""

        def flag_leaf(of: Any) -> bool | jax.Array:
            if not np.ndim(of):
                return values[int(of)]
            own = [values[p] for p in of]
            is_never = all(each is False for each in own)
            return False if is_never else jnp.stack(_arrays(own))

        return jax.tree.unflatten(self._structure, list(map(flag_leaf, self.of)))

    def tabulate_flags(self, values: Sequence[bool | jax.Array]) -> jax.Array:
        """Return the flags of all slices, (leaves, slices); the row of a whole leaf repeats one flag."""
        width = max([len(of) for of in self.of if np.ndim(of)], default=1)
        rows = [
            np.pad(of, (0, width - len(of))) if np.ndim(of) else np.full(width, of)
            for of in self.of
        ]
        return jnp.stack(_arrays(values))[np.array(rows, int).reshape(len(rows), width)]


def read_flags(table: jax.Array, tree: Any, stack: int) -> Any:
    """Return the flags of `tabulate_flags` as a tree that broadcasts against the leaves of a tree.

    Args:
      table: The flags, with leading axes of replicas.
      tree: The tree that was divided into fragments, with the same leading axes.
      stack: The number of these axes.
    """
    leaves, structure = jax.tree.flatten(tree)

    def read(row: jax.Array, leaf: jax.Array) -> jax.Array:
        # All flags of a whole leaf are equal, so they can be read as flags of slices.
        length = leaf.shape[stack] if leaf.ndim > stack else 1
        length = length if length <= table.shape[-1] else 1
        shape = (*leaf.shape[:stack], length, *[1] * (leaf.ndim - stack - 1))
        row = row[..., :length].reshape(shape[: leaf.ndim])
        return row if length == 1 else shard_like(jnp.broadcast_to(row, leaf.shape), leaf)

    return jax.tree.unflatten(structure, list(map(read, unstack(table, -2), leaves)))


def _assign(tree: Any, number: int, fragment_of: FragmentOf) -> list[Any]:
    """Return the fragment of each leaf, or of each of its slices, as assigned by the user."""
    plain = without_boxes(tree)
    leaves = jax.tree_util.tree_leaves_with_path(plain)
    structure: Any = jax.tree.structure(plain)
    if is_function(fragment_of):
        given = [fragment_of(path, leaf) for path, leaf in leaves]
    else:
        given = structure.flatten_up_to(mask_like(without_boxes(fragment_of), plain))
    result = [np.asarray(each) for each in given]
    for (path, leaf), of in zip(leaves, result, strict=True):
        is_one = of.ndim == 0 or of.shape == np.shape(leaf)[:1]
        is_fragment = np.issubdtype(of.dtype, np.integer) and np.all((of >= 0) & (of < number))
        if not (is_one and is_fragment):
            name, shape = f"params{jax.tree_util.keystr(path)}", np.shape(leaf)
            wanted = (
                f"an integer in [0, {number}), or a sequence with an integer for each slice along axis "
                f"0 of the shape {shape}"
            )
            raise ValueError(f"fragment_of for {name} must be {wanted}, got {of.tolist()!r}.")
    missing = set(range(number)) - {int(p) for of in result for p in of.reshape(-1)}
    if missing and leaves:
        raise ValueError(f"fragment_of assigns nothing to the plan's fragments {sorted(missing)}.")
    return result


def _arrays(values: Sequence[bool | jax.Array]) -> list[jax.Array]:
    return [jnp.asarray(value, jnp.bool_) for value in values]


def _take(leaf: Any, rows: Any) -> Any:
    """Return rows of a leaf, with the sharding of the other axes unchanged."""
    sharding = explicit_sharding(leaf)
    return leaf[rows] if sharding is None else leaf.at[rows].get(out_sharding=sharding)
