"""Call Python from a compiled program for the weight vectors on a device.

`jax.pure_callback` has two problems. It has no partitioning rule: on a mesh, XLA gathers the operands on
device 0, which calls the host, and copies the results to the other devices. On a mesh of CPU devices, it
can also hang, because it waits for arrays from the device that it blocks. Therefore, `call_target` calls
the target of JAX's own callbacks under its own partitioning rule (on the CPU, without copies). A TPU has
no custom calls of the host.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

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
    if platform == "cpu":
        target = "xla_buffer_python_cpu_callback"
        module.add_host_callback(functools.partial(_on_buffers, signature, on_host))
    elif platform in ("cuda", "rocm"):
        target = "xla_ffi_python_gpu_callback"
        module.add_host_callback(functools.partial(on_copies, signature, on_host))
    else:
        raise NotImplementedError(
            f"sgperm needs a CPU or a GPU, got {platform}: run the update on the CPU (jax.jit with "
            "params on jax.devices('cpu')), or use optperm.laperm."
        )
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
