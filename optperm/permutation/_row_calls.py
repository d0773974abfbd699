"""Custom calls of XLA on weight vectors, with one batching rule and one partitioning rule for all.

All operands belong to weight vectors ("rows"), which are independent of each other. Therefore a batch of
calls is one call with more rows, and each device of a mesh makes the call for its own rows.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

Results = tuple[jax.Array, ...]


class Signature(NamedTuple):
    """The operands and results of a call. Operand 1 is a matrix with the sharding of the rows.

    Attributes:
      operands: The kind of each operand: "matrix", (batch, n, *rows); "vector", (batch, *rows); or
        "pair", (batch, *rows, 2). The rows may have any number of axes.
      results: For each result, the index of an operand with the same shape and dtype.
      in_place: Whether each result overwrites its operand, so that donated operands are not copied.
    """

    operands: tuple[str, ...]
    results: tuple[int, ...]
    in_place: bool = False

    def axes(self, batch: Any, n: Any, rows: Sequence[Any], pair: Any) -> list[tuple[Any, ...]]:
        """Return a tuple for each operand, with the given value for each of its axes."""
        of = {
            "matrix": (batch, n, *rows),
            "vector": (batch, *rows),
            "pair": (batch, *rows, pair),
        }
        return [of[kind] for kind in self.operands]

    def of_results(self, of_operands: Sequence[Any]) -> tuple[Any, ...]:
        """Return, for each result, the given value of its operand."""
        return tuple(of_operands[index] for index in self.results)

    def types(self, operands: Sequence[jax.Array]) -> Results:
        """Return the types of the results."""
        return self.of_results([jax.typeof(operand) for operand in operands])

    def on_flat_rows(self, function: Callable[..., Any], *operands: Any) -> tuple[Any, ...]:
        """Call a function on operands with a single axis of rows, as the targets require."""
        batch, n, *rows = operands[1].shape
        shapes = self.axes(batch, n, [math.prod(rows)], 2)
        results = function(*(x.reshape(shape) for x, shape in zip(operands, shapes, strict=True)))
        likes = self.of_results(operands)
        return tuple(x.reshape(like.shape) for x, like in zip(results, likes, strict=True))


def batch_calls(signature: Signature, function: Callable[..., Results]) -> Callable[..., Results]:
    """Make a function that `jax.vmap` batches by enlarging the leading axis of its arguments.

    If types show the sharding of the rows, each device calls the function for its own rows.
    """
    on_shards = jax.jit(functools.partial(_on_shards, signature, function))

    @jax.custom_batching.custom_vmap
    def call(*operands: jax.Array) -> Results:
        axis_types = set(jax.typeof(operands[1]).sharding.mesh.axis_types)
        if AxisType.Explicit in axis_types or axis_types == {AxisType.Manual, AxisType.Auto}:
            return on_shards(*operands)
        return function(*operands)

    @call.def_vmap
    def batch(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Results, Any]:
        whole = [
            x if b else jnp.broadcast_to(x, (size, *x.shape))
            for x, b in zip(operands, is_batched, strict=True)
        ]
        # Only the first of two merged axes can be sharded on an explicit mesh.
        specs = [jax.typeof(x).sharding.spec for x in whole]
        if any(spec[1] for spec in specs) and not any(spec[0] for spec in specs):
            merged = [jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]) for x in whole]
            parts = (x.reshape(-1, size, *x.shape[1:]) for x in call(*merged))
            results = tuple(jnp.swapaxes(x, 0, 1) for x in parts)
        else:
            merged = [x.reshape(-1, *x.shape[2:]) for x in whole]
            results = tuple(x.reshape(size, -1, *x.shape[1:]) for x in call(*merged))
        return results, (True,) * len(results)

    return call


def _on_shards(
    signature: Signature, function: Callable[..., Results], *operands: jax.Array
) -> Results:
    """Call the function on each device of a mesh for the rows on this device.

    For explicit axes, types show these rows; along other axes, each device gets all rows.
    """
    shardings = [jax.typeof(operand).sharding for operand in operands]
    mesh, (_, _, *rows) = shardings[1].mesh, shardings[1].spec
    # `jax.vmap` may have sharded the batch axis of only some operands.
    batch = next((sharding.spec[0] for sharding in shardings if sharding.spec[0]), None)
    specs = tuple(P(*axes) for axes in signature.axes(batch, None, rows, None))
    spread = (
        operand
        if sharding.spec == spec
        else jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, sharding, spec in zip(operands, shardings, specs, strict=True)
    )
    on_device = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=signature.of_results(specs)
    )
    return on_device(*spread)


@functools.partial(custom_partitioning, static_argnums=(0, 1, 2))
def call_target(
    signature: Signature, target: str, attributes: tuple[tuple[str, Any], ...], *operands: Any
) -> Results:
    """Make XLA's custom call of a target; attributes are pairs of a name and a value."""

    def call(*flat: jax.Array) -> Sequence[jax.Array]:
        results = signature.results if signature.in_place else ()
        aliases = {operand: result for result, operand in enumerate(results)}
        function = jax.ffi.ffi_call(target, signature.types(flat), input_output_aliases=aliases)
        return function(*jax.lax.optimization_barrier(flat), **dict(attributes))

    return signature.on_flat_rows(call, *operands)


def _partition(
    signature: Signature, target: str, attributes: Any, mesh: Any, operands: Any, results: Any
) -> Any:
    """Partition a call so that each device processes its own rows, and no row is split."""
    del results
    batch, _, *rows = operands[1].sharding.spec
    shardings = tuple(
        NamedSharding(mesh, P(*axes)) for axes in signature.axes(batch, None, rows, None)
    )

    def on_one_device(*local: jax.Array) -> Results:
        return call_target.fun(signature, target, attributes, *local)

    return mesh, on_one_device, signature.of_results(shardings), shardings


def _sharding_rule(
    signature: Signature,
    target: str,
    attributes: Any,
    mesh: Any,
    operands: Sequence[Any],
    results: Any,
) -> SdyShardingRule:
    del target, attributes, mesh, results
    rows = [f"row{axis}" for axis in range(operands[1].rank - 2)]
    axes = tuple(ArrayMapping(*names) for names in signature.axes("batch", "n", rows, "pair"))
    whole = ("n", "pair") if "pair" in signature.operands else ("n",)
    return SdyShardingRule(axes, signature.of_results(axes), need_replication_factors=whole)


call_target.def_partition(_partition, sharding_rule=_sharding_rule)
