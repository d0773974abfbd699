"""Where arrays lie on a mesh, kept as it is.

On a mesh with explicit axes the sharding is a part of an array's type, inside `jax.jit` too. On one with
automatic axes the compiler decides inside `jax.jit`, and only arrays themselves, outside, tell.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P


def type_of(leaf: Any) -> Any:
    """What `jax.typeof` says, or a shape of `jax.eval_shape` itself where that fails.

    It does beside mapped axes on a mesh whose other axes are automatic: such a shape forgets its mesh.
    """
    is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
    is_complete = is_shape and leaf.sharding is None and leaf.manual_axis_type is not None
    return leaf if is_complete else jax.typeof(leaf)


def explicit_sharding(*leaves: Any) -> NamedSharding | None:
    """The sharding that is a part of an array's type, or None where its mesh has no explicit axes.

    Of several arrays it is that of the first one that is cut at all, or of the first.
    """
    found = [type_of(leaf).sharding for leaf in leaves]
    explicit = [each for each in found if each and AxisType.Explicit in each.mesh.axis_types]
    return next((each for each in explicit if any(each.spec)), next(iter(explicit), None))


def shard_like(leaf: Any, *others: Any) -> Any:
    """An array where others of the same shape lie, as far as that can be seen."""
    wanted, other = explicit_sharding(*others), next(filter(is_spread, others), None)
    if other is None or isinstance(leaf, jax.core.Tracer):
        is_same = wanted is None or explicit_sharding(leaf) == wanted
        return leaf if is_same else jax.sharding.reshard(leaf, wanted)
    # Outside of jax.jit the array itself names its devices, which a type does only within jax.set_mesh.
    is_same = (
        explicit_sharding(leaf) == wanted
        and is_spread(leaf)
        and leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim)
    )
    return leaf if is_same else jax.device_put(leaf, other.sharding)


def on_different_meshes(leaf: Any, other: Any) -> bool:
    """Whether two arrays, or their shapes, are seen to be spread over different meshes."""
    one, two = (
        explicit_sharding(each) if isinstance(each, jax.core.Tracer) else _spread_sharding(each)
        for each in (leaf, other)
    )
    if one is None or two is None:
        return False
    if isinstance(leaf, jax.core.Tracer) or isinstance(other, jax.core.Tracer):
        return bool(one.mesh.abstract_mesh != two.mesh.abstract_mesh)
    return bool(one.device_set != two.device_set)


def is_cut_alone(leaf: Any, other: Any) -> bool:
    """Whether an explicit mesh, set by `jax.set_mesh`, cuts an array and not another one."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return False
    one, two = explicit_sharding(leaf), explicit_sharding(other)
    return one is not None and any(one.spec) and not (two is not None and any(two.spec))


def sharding_of(leaf: Any) -> NamedSharding | None:
    """How a leaf is spread over a mesh, or None where that cannot be seen."""
    sharding = explicit_sharding(leaf) if isinstance(leaf, jax.core.Tracer) else None
    return sharding or _spread_sharding(leaf)


def row_sharding(leaf: Any) -> NamedSharding | None:
    """How one row of a leaf's leading axis is spread, or None where that cannot be seen."""
    sharding = sharding_of(leaf)
    return sharding and NamedSharding(sharding.mesh, P(*sharding.spec[1:]))


def _spread_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding over a mesh of an array that is not traced, or of its shape."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.num_devices > 1 else None


def describe(leaf: Any) -> str:
    """Where an array lies, for a message."""
    sharding = None if isinstance(leaf, jax.core.Tracer) else leaf.sharding
    # While tracing, a mesh is abstract: it has no devices yet, and raises where it is asked for them.
    if sharding is None or isinstance(getattr(sharding, "mesh", None), AbstractMesh):
        return str(jax.typeof(leaf))
    devices = sorted(device.id for device in sharding.device_set)
    return f"devices {devices} by {getattr(sharding, 'spec', sharding)}"


def is_spread(leaf: Any) -> bool:
    """Whether a leaf is an array whose place is known and is more than one device."""
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and len(leaf.sharding.device_set) > 1


def rows_like(leaf: Any, num_rows: int, dtype: Any) -> jax.Array:
    """Zeros with a leading axis of rows, each of which lies where the leaf does."""
    # Inside of jax.jit but without jax.set_mesh zeros do not lie on the leaf's mesh by themselves.
    zeros = shard_like(jnp.zeros_like(leaf, dtype=dtype), leaf)
    return jnp.broadcast_to(zeros[None], (num_rows, *jnp.shape(leaf)))


def unshard(tree: Any) -> Any:
    """The tree with all of every leaf on each device, where the compiler does not see to it itself.

    On an explicit mesh what is cut differently cannot be joined, and some axes cannot be indexed.
    """

    def of_leaf(leaf: Any) -> Any:
        sharding = explicit_sharding(leaf)
        return leaf if sharding is None else jax.sharding.reshard(leaf, sharding.update(spec=P()))

    return jax.tree.map(of_leaf, tree)


def take(leaf: jax.Array, *indices: jax.Array) -> jax.Array:
    """One entry along each of the leading axes, which may be cut; the others lie as they did."""
    sharding = explicit_sharding(leaf)
    if sharding is None:
        return leaf[indices]
    # As a gather, which is defined on cut axes, where a slice is not.
    places = tuple(index[None] for index in indices)
    one = sharding.update(spec=P(None, *sharding.spec[len(indices) :]))
    return leaf.at[places].get(out_sharding=one)[0]


def can_be_seen(leaf: Any) -> bool:
    """Whether this process can look at an array now: it is not traced, and lies here as a whole."""
    if isinstance(leaf, np.ndarray | np.generic):  # from a checkpoint
        return True
    is_array = isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    return is_array and (leaf.is_fully_addressable or leaf.is_fully_replicated)
