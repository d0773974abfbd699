"""Calls of the host from TPU programs: each device calls for its own weight vectors.

A TPU has no custom calls of the host. There a callback of JAX becomes sends and receives, one for each
array, without a partitioning rule: outside of `jax.shard_map` XLA gathers the operands on device 0,
which calls the host, and copies the results to the other devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optperm.permutation._row_calls import Results, Signature


def lower_call(
    signature: Signature,
    on_host: Callable[..., Any],
    context: mlir.LoweringRuleContext,
    *operands: Any,
) -> Sequence[Any]:
    """Lower a call of `cycles.permute_rows` on the host.

    In `jax.shard_map` each device calls by itself. Elsewhere the compiler has not yet decided how the
    operands are sharded: the weight vectors are split over all axes of the mesh, in their order.
    """
    call: Callable[..., Results] = functools.partial(exchange, signature, on_host)
    axis_context: Any = context.module_context.axis_context
    devices = getattr(axis_context, "device_assignment", None) or ()
    if len(devices) > 1:
        named = axis_context.abstract_mesh
        names, sizes = (
            (named.axis_names, named.axis_sizes) if named else (("devices",), (len(devices),))
        )
        call = on_all_devices(signature, call, Mesh(np.array(devices).reshape(sizes), names))
    return mlir.lower_fun(call, multiple_results=True)(context, *operands)


def on_all_devices(
    signature: Signature, call: Callable[..., Results], mesh: Mesh
) -> Callable[..., Results]:
    """Make a function that calls on each device of a mesh, for its share of the rows.

    Along an axis of the mesh that divides no axis of the rows, the devices repeat the call.
    """

    def on_each(*operands: jax.Array) -> Results:
        shape = operands[1].shape[2:]
        rows: list[tuple[str, ...]] = [()] * len(shape)
        for name, size in mesh.shape.items():
            for axis in reversed(range(len(shape))):
                if shape[axis] % (size * math.prod(mesh.shape[each] for each in rows[axis])) == 0:
                    rows[axis] = (*rows[axis], name)
                    break
        specs = tuple(P(*axes) for axes in signature.axes(None, None, rows, None))
        results = signature.of_results(specs)
        return jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=results, check_vma=False)(
            *operands
        )

    return on_each


def exchange(signature: Signature, on_host: Callable[..., Any], *operands: jax.Array) -> Results:
    """Send four arrays and receive two, rather than six and three.

    The four numbers of each weight vector are one array, and the device counts the moved entries.
    """
    m, weights, ranks, seeds, *numbers = operands
    seeds = jnp.moveaxis(seeds, -1, 1)  # a last axis of two takes 64 times its memory
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32)[:, None] for x in numbers)
    of_rows = jnp.concatenate([seeds, *bits], axis=1)

    def permute(m: Any, weights: Any, ranks: Any, of_rows: Any) -> tuple[np.ndarray, ...]:
        of_rows = np.asarray(of_rows)
        parts = [np.ascontiguousarray(of_rows[:, index]) for index in range(4)]
        seeds = np.stack(parts[:2], axis=-1)
        numbers = parts[2].view(np.float32), parts[3].view(np.int32)
        arrays = map(np.asarray, (m, weights, ranks, seeds, *numbers))
        return signature.on_flat_rows(on_host, *arrays)[:2]

    types = jax.eval_shape(lambda *arrays: arrays, weights, ranks)
    new_weights, new_ranks = jax.pure_callback(permute, types, m, weights, ranks, of_rows)
    return new_weights, new_ranks, jnp.sum(new_ranks != ranks, axis=1, dtype=jnp.int32)
