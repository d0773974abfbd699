"""Runs of several replicas that commit by a plan, and the traffic of their programs."""

import functools
from typing import Any

import jax
import numpy as np
from collectives import find_collectives
from commit_methods import AXIS
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from library_bytes import loss_fn

import optperm


def run(name: str, tx: Any, plan: Any, params: Any, batches: Any, mesh: Mesh) -> Any:
    """What all replicas have trained, and the bytes that each step has sent."""

    def step(params: Any, opt_state: Any, ids: jax.Array, commit: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss_fn)(params, ids)
        grads = jax.lax.pmean(grads, AXIS) if "in step" in name else grads
        updates, opt_state = tx.update(grads, opt_state, params, commit=commit)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    programs, sent = dict[Any, tuple[Any, int]](), list[int]()
    stacked = jax.tree.map(lambda leaf: np.stack([leaf] * mesh.size), params)
    opt_state = jax.jit(jax.vmap(tx.init))(stacked)
    carry = jax.device_get((stacked, opt_state))  # the same in each process
    carry = jax.device_put(carry, NamedSharding(mesh, P(AXIS)))
    for number, ids in enumerate(batches, start=1):
        exchange = plan and plan.at(number)
        commit = exchange if name != "agn" or exchange is None else bool(exchange.send)
        if commit not in programs:
            block = jax.vmap(functools.partial(step, commit=commit))
            mapped = jax.shard_map(block, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
            compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carry, ids).compile()
            programs[commit] = compiled, sum(c.bytes for c in find_collectives(compiled.as_text()))
        program, size = programs[commit]
        carry = jax.block_until_ready(program(*carry, ids))
        sent.append(size)
    trained, whole = (
        optperm.distributed.center_params(carry[1]) if plan else carry[0],
        NamedSharding(mesh, P()),
    )
    first = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf[0], tree), out_shardings=whole)
    return jax.device_get(first(trained)), sent
