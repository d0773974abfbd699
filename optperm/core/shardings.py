"""Preserve the sharding of arrays over a mesh.

On a mesh with explicit axes, the sharding is part of an array's type, even inside `jax.jit`. On a mesh
with automatic axes, the compiler decides the sharding inside `jax.jit`, so only concrete arrays have a
known sharding.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def type_of(leaf: Any) -> Any:
    """Return `jax.typeof(leaf)`, or a shape from `jax.eval_shape` unchanged if `jax.typeof` fails.

    Within mapped axes on a mesh whose other axes are automatic, `jax.typeof` fails: shapes have no mesh.
    """
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    is_complete = is_shape and leaf.sharding is None and leaf.manual_axis_type is not None
    return leaf if is_complete else jax.typeof(leaf)


def explicit_sharding(*leaves: Any) -> NamedSharding | None:
    """Return the sharding in an array's type, or None if its mesh has no explicit axes.

    For several arrays, return the first sharding over any axis, or else the first sharding.
    """
    found = [type_of(leaf).sharding for leaf in leaves]
    explicit = [each for each in found if each and AxisType.Explicit in each.mesh.axis_types]
    return next((each for each in explicit if any(each.spec)), next(iter(explicit), None))


def explicit_mesh(*trees: Any) -> AbstractContextManager[Any]:
    """Return `jax.set_mesh` of the mesh with explicit axes on which an array is; else a null context.

    Outside of this context, JAX does not know on which devices to put the new arrays of a program.
    """
    arrays = [leaf for leaf in jax.tree.leaves(trees) if isinstance(leaf, jax.Array)]
    known = [leaf.sharding for leaf in arrays if not isinstance(leaf, jax.core.Tracer)]
    meshes: list[Any] = [each.mesh for each in known if isinstance(each, NamedSharding)]
    mesh = next((each for each in meshes if AxisType.Explicit in each.axis_types), None)
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def shard_like(leaf: Any, *others: Any) -> Any:
    """Return an array with the sharding of other arrays of the same shape, as far as it is known."""
    wanted, other = explicit_sharding(*others), next(filter(is_spread, others), None)
    if other is None or isinstance(leaf, jax.core.Tracer):
        is_same = wanted is None or explicit_sharding(leaf) == wanted
        return leaf if is_same else jax.sharding.reshard(leaf, wanted)
    # Outside jax.jit, the array itself knows its devices, but its type only within jax.set_mesh.
    is_same = (
        explicit_sharding(leaf) == wanted
        and is_spread(leaf)
        and leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    )
    return leaf if is_same else jax.device_put(leaf, other.sharding)


def sharding_of(leaf: Any) -> NamedSharding | None:
    """Return the sharding of a leaf over a mesh, or None if it is not known."""
    sharding = explicit_sharding(leaf) if isinstance(leaf, jax.core.Tracer) else None
    return sharding or _spread_sharding(leaf)


def row_sharding(leaf: Any) -> NamedSharding | None:
    """Return the sharding of one row of a leaf's leading axis, or None if it is not known."""
    sharding = sharding_of(leaf)
    return sharding and NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def _spread_sharding(leaf: Any) -> NamedSharding | None:
    """Return the sharding over a mesh of a concrete array or of its shape, or None."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None


def is_spread(leaf: Any) -> bool:
    """Return whether a leaf is a concrete array on more than one device."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and len(leaf.sharding.device_set) > 1


def rows_like(leaf: Any, num_rows: int, dtype: Any) -> jax.Array:
    """Return zeros with a leading axis of rows, each sharded like the leaf."""
    # Inside jax.jit, but without jax.set_mesh, new zeros are not on the leaf's mesh.
    zeros = shard_like(jnp.zeros_like(leaf, dtype=dtype), leaf)
    return jnp.broadcast_to(zeros[None], (num_rows, *jnp.shape(leaf)))


def unshard(tree: Any) -> Any:
    """Return the tree with all leaves replicated on an explicit mesh; otherwise the compiler decides.

    On an explicit mesh, differently sharded leaves cannot be joined, and some axes cannot be indexed.
    """

    def replicate(leaf: Any) -> Any:
        sharding = explicit_sharding(leaf)
        return leaf if sharding is None else jax.sharding.reshard(leaf, sharding.update(spec=P()))

    return jax.tree.map(replicate, tree)


def take(leaf: jax.Array, *indices: jax.Array) -> jax.Array:
    """Index the leading axes of a leaf, which may be sharded; the other axes stay sharded."""
    sharding = explicit_sharding(leaf)
    if sharding is None:
        return leaf[indices]
    # Unlike a slice, a gather is defined on sharded axes.
    places = tuple(index[None] for index in indices)
    one = sharding.update(spec=P(None, *sharding.spec[len(indices) :]))
    return leaf.at[places].get(out_sharding=one)[0]


def take_rows(leaf: Any, rows: jax.Array) -> jax.Array:
    """Return the rows of a leaf's leading axis at given indices; the other axes stay sharded."""
    sharding = explicit_sharding(leaf)
    if sharding is None:
        return jnp.asarray(leaf)[rows]
    return leaf.at[rows].get(out_sharding=sharding.update(spec=P(None, *sharding.spec[1:])))


def can_be_seen(leaf: Any) -> bool:
    """Return whether this process has all entries of an array, and the array is not traced."""
    if isinstance(leaf, np.ndarray | np.generic):  # from a checkpoint
        return True
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and (leaf.is_fully_addressable or leaf.is_fully_replicated)
