"""Call Python from a compiled program for the weight vectors on a device.

`jax.pure_callback` has two problems. It has no partitioning rule: on a mesh, XLA gathers the operands on
device 0, which calls the host, and copies the results to the other devices. On a mesh of CPU devices, it
can also hang, because it waits for arrays from the device that it blocks. Therefore

- on the CPU and on a GPU, `call_target` calls the target of JAX's own callbacks under the partitioning
  rule of `call_target` (on the CPU, without copies);
- on a TPU, which has no custom calls of the host, each device calls `jax.pure_callback` for its own
  weight vectors, within a `jax.shard_map` over all devices.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from optperm.permutation._row_calls import Results, Signature, call_target

# (operands, results to write) -> None; all arrays have a single axis of rows
OnHost = Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]


def call_python(
    signature: Signature,
    on_host: OnHost,
    by_target: Callable[..., Results],
    *operands: jax.Array,
) -> Results:
    """Call a function of the host.

    Args:
      signature: The operands and results.
      on_host: The function.
      by_target: A call of a target with the same operands. It never runs, but shows JAX that a target is
        called, so that a lowering learns the devices of the program.
      operands: The operands.
    """
    call = jax.make_jaxpr(by_target)(*operands)
    return tuple(_call_p.bind(*operands, signature=signature, on_host=on_host, call=call))


_call_p = Primitive("optperm_host_call")
_call_p.multiple_results = True
_call_p.def_abstract_eval(lambda *operands, signature, **_: signature.of_results(operands))


def _lower(
    context: mlir.LoweringRuleContext,
    *operands: Any,
    signature: Signature,
    on_host: OnHost,
    call: Any,
) -> Sequence[Any]:
    del call
    module = context.module_context
    if len(module.platforms) > 1:
        raise NotImplementedError(
            "Python callbacks need a single platform: export the update for the CPU"
        )
    (platform,) = module.platforms
    if platform == "tpu":
        function = _on_tpu(signature, on_host, module.axis_context)
    else:
        if platform == "cpu":
            target = "xla_buffer_python_cpu_callback"
            module.add_host_callback(functools.partial(_on_buffers, signature, on_host))
        else:
            target = "xla_ffi_python_gpu_callback"
            module.add_host_callback(functools.partial(on_copies, signature, on_host))
        index = (("index", np.uint64(len(module.host_callbacks) - 1)),)
        function = functools.partial(call_target, signature, target, index)
    return mlir.lower_fun(function, multiple_results=True)(context, *operands)


mlir.register_lowering(_call_p, _lower)


def _on_buffers(signature: Signature, on_host: OnHost, _: Any, *buffers: Any) -> tuple[()]:
    """Call a function on CPU buffers: the operands, and the results to write."""
    arrays = [np.asarray(buffer) for buffer in buffers]
    number = len(signature.operands)
    on_host(arrays[:number], arrays[number:])
    return ()


def on_copies(signature: Signature, on_host: OnHost, *operands: Any) -> tuple[np.ndarray, ...]:
    """Call a function on contiguous operands, and return the results in new arrays."""
    arrays = [np.ascontiguousarray(operand) for operand in operands]
    results = tuple(np.empty_like(array) for array in signature.of_results(arrays))
    on_host(arrays, results)
    return results


def _on_tpu(signature: Signature, on_host: OnHost, axis_context: Any) -> Callable[..., Results]:
    """Make a function that calls the host on each device.

    In `jax.shard_map`, each device calls by itself. Otherwise, the compiler has not yet decided the
    sharding of the operands, so the weight vectors are split over all axes of the mesh in order.
    """
    call: Callable[..., Results] = functools.partial(exchange, signature, on_host)
    devices = getattr(axis_context, "device_assignment", None) or ()
    if len(devices) <= 1:
        return call
    named = axis_context.abstract_mesh
    names, sizes = (
        (named.axis_names, named.axis_sizes) if named else (("devices",), (len(devices),))
    )
    return on_all_devices(signature, call, Mesh(np.array(devices).reshape(sizes), names))


def on_all_devices(
    signature: Signature, call: Callable[..., Results], mesh: Mesh
) -> Callable[..., Results]:
    """Make a function that calls the host on each device of a mesh, for a part of the rows.

    Along an axis of the mesh whose size divides no axis of the rows, devices repeat the same call.
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


def exchange(signature: Signature, on_host: OnHost, *operands: jax.Array) -> Results:
    """Call the host for a permutation, sending four arrays instead of six and receiving two, not three.

    The four numbers per weight vector form one array, and the device counts the moved entries.
    """
    m, weights, ranks, seeds, *numbers = operands
    seeds = jnp.moveaxis(seeds, -1, 1)  # a last axis of length 2 takes 64 times the memory
    bits = (jax.lax.bitcast_convert_type(x, jnp.uint32)[:, None] for x in numbers)
    of_rows = jnp.concatenate([seeds, *bits], axis=1)

    def permute(m: Any, weights: Any, ranks: Any, of_rows: Any) -> tuple[np.ndarray, ...]:
        of_rows = np.asarray(of_rows)
        parts = [np.ascontiguousarray(of_rows[:, index]) for index in range(4)]
        seeds = np.stack(parts[:2], axis=-1)
        numbers = parts[2].view(np.float32), parts[3].view(np.int32)
        arrays = map(np.asarray, (m, weights, ranks, seeds, *numbers))
        call = functools.partial(on_copies, signature, on_host)
        return signature.on_flat_rows(call, *arrays)[:2]

    types = jax.eval_shape(lambda *arrays: arrays, weights, ranks)
    new_weights, new_ranks = jax.pure_callback(permute, types, m, weights, ranks, of_rows)
    return new_weights, new_ranks, jnp.sum(new_ranks != ranks, axis=1, dtype=jnp.int32)
