"""Rare, streaming and compressed commits on a byte-level transformer: loss over bytes sent.

A small decoder learns the sources of Python's own standard library; one module in ten is held out. Four
replicas start together after some steps of synchronous training, and go on for as many tokens each: in
step, alone (which a method has to beat), by AGN, and by DiLoCo whole, streamed and compressed. What a
device sends is read from the compiled programs. The inner optimizer is AdamW with a cosine.

    python examples/byte_transformer.py [--seeds N] [--steps N] [--common N] [--out FILE.png]
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from collectives import find_collectives
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from library_bytes import CONTEXT, Decoder, draw, load, loss_fn, windows

import optperm

AXIS, REPLICAS, BATCH, PERIOD, RATE = "replica", 4, 8, 10, 3e-3


def methods(steps: int) -> dict[str, tuple[Any, optperm.Every | None]]:
    """What trains, and when fragments are exchanged."""
    rates = optax.cosine_decay_schedule(RATE, steps, 0.05)
    inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.01))
    whole, parts = optperm.Every(PERIOD), optperm.Every(PERIOD, fragments=4, delay=1)
    diloco = functools.partial(optperm.diloco, inner, axis_name=AXIS)
    average, few = optax.sgd(1.0), optperm.compress_top_k(1 / 16, bits=2)
    return {
        "in step": (inner, None),
        "alone": (inner, None),
        "agn": (optperm.agn(inner, PERIOD, axis_name=AXIS), whole),
        "diloco, averaging": (diloco(average, whole), whole),
        "diloco, outer .7, .9": (diloco(None, whole), whole),
        "streaming, mixing .5": (diloco(average, parts, mixing=0.5), parts),
        "4 bits": (diloco(average, whole, compress=optperm.compress_quantized(4)), whole),
        "top 1/16 at 2 bits": (diloco(average, whole, compress=few), whole),
    }


def run(name: str, tx: Any, plan: Any, params: Any, batches: Any, mesh: Mesh) -> Any:
    """What all replicas have trained, and the bytes that each step has sent."""

    def step(params: Any, opt_state: Any, ids: jax.Array, commit: Any) -> tuple[Any, Any]:
        grads = jax.grad(loss_fn)(params, ids)
        grads = jax.lax.pmean(grads, AXIS) if name == "in step" else grads
        updates, opt_state = tx.update(grads, opt_state, params, commit=commit)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    programs, sent = dict[Any, tuple[Any, int]](), list[int]()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * REPLICAS), params)
    carry = jax.device_put((stacked, jax.vmap(tx.init)(stacked)), NamedSharding(mesh, P(AXIS)))
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
    trained = optperm.center_params(carry[1]) if plan else carry[0]
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[0]), trained), sent


def train(steps: int, common: int, seed: int) -> dict[str, tuple[float, float, int]]:
    """By method: nats a byte on what was held out, bytes a step in the mean, and the most in one."""
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))
    (data, held), evaluate = load(), jax.jit(loss_fn)
    test = windows(held, np.random.default_rng(1), 256)

    def batches(count: int, stream: int) -> Any:
        rng = np.random.default_rng((seed, stream))
        for _ in range(count):
            ids = windows(data, rng, REPLICAS, BATCH)
            yield jax.device_put(ids, NamedSharding(mesh, P(AXIS)))

    params = Decoder().init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))
    together = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))
    params, _ = run("in step", together, None, params, batches(common, 0), mesh)
    print(f"seed {seed}: {evaluate(params, test):.3f} nats a byte after {common} common steps")
    results = dict[str, tuple[float, float, int]]()
    for name, (tx, plan) in methods(steps).items():
        trained, sent = run(name, tx, plan, params, batches(steps, 1), mesh)
        results[name] = float(evaluate(trained, test)), sum(sent) / len(sent), max(sent)
    return results


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Trains by every method, prints the table and draws loss over bytes; the losses of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("--seeds", 1), ("--steps", 400), ("--common", 200)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--out", default="byte_transformer.png")
    chosen = parser.parse_args(argv)
    every = [train(chosen.steps, chosen.common, seed) for seed in range(chosen.seeds)]
    print(f"{'method':22}  nats a byte  bytes a step  most in one")
    losses = {name: [result[name][0] for result in every] for name in every[0]}
    for name, values in losses.items():
        _, mean, most = every[0][name]
        print(f"{name:22}  {np.mean(values):5.3f} {np.std(values):5.3f}  {mean:12.1f}  {most:11d}")
    draw(losses, {name: every[0][name][1] for name in losses}, chosen.out)
    return losses


if __name__ == "__main__":
    # Where there are too few devices, the processor stands in for four. JAX asks when it starts.
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    main()
