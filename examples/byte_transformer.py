"""Rare, streaming and compressed commits on a byte-level transformer: loss over bytes sent.

A small decoder learns the sources of Python's own standard library, byte by byte; one file in ten is
held out. Four replicas start together after some steps of synchronous training, and go on for as many
tokens each: in step, alone (which a method has to beat), by AGN, and by DiLoCo whole, streamed and
compressed. What a device sends is read from the compiled programs. The inner optimizer is AdamW with a
cosine.

    python examples/byte_transformer.py [--seeds N] [--steps N] [--common N] [--out FILE.png]
"""

import argparse
import functools
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from collectives import find_collectives
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure

import optperm

AXIS, REPLICAS, BATCH, CONTEXT, WIDTH, LAYERS, HEADS, PERIOD = "replica", 4, 8, 64, 96, 3, 4, 10
RATE = 3e-3


class Decoder(nn.Module):
    """A transformer that tells the next byte from those before it."""

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        """Maps bytes (batch, time) to logits (batch, time, 256)."""
        embed = nn.Embed(256, WIDTH, embedding_init=nn.initializers.normal(0.02))
        x = embed(ids) + self.param("place", nn.initializers.normal(0.02), (CONTEXT, WIDTH))
        for _ in range(LAYERS):
            qkv = nn.Dense(3 * WIDTH, use_bias=False)(nn.LayerNorm()(x))
            heads = qkv.reshape(*x.shape[:2], 3, HEADS, WIDTH // HEADS)
            seen = jax.nn.dot_product_attention(*jnp.moveaxis(heads, 2, 0), is_causal=True)
            x = x + nn.Dense(WIDTH, use_bias=False)(seen.reshape(x.shape))
            x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def loss_fn(params: Any, ids: jax.Array) -> jax.Array:
    """Mean cross entropy of the next byte, in nats."""
    logits = Decoder().apply(params, ids[:, :-1])
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]))


def sources() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules to train on, and those of one in ten."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    held = [path.read_bytes() for path in files[::10]]
    kept = [path.read_bytes() for index, path in enumerate(files) if index % 10]
    return np.frombuffer(b"\n".join(kept), np.uint8), np.frombuffer(b"\n".join(held), np.uint8)


def windows(data: np.ndarray, rng: np.random.Generator, *lead: int) -> np.ndarray:
    """Random stretches of one byte more than the decoder sees."""
    starts = rng.integers(0, len(data) - CONTEXT - 1, lead)
    return data[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def methods(steps: int) -> dict[str, tuple[Any, Any]]:
    """What trains, and its plan: "in step", "alone", or when fragments are exchanged."""

    def inner(rate: float = RATE) -> optax.GradientTransformation:
        rates = optax.cosine_decay_schedule(rate, steps, 0.05)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.01))

    def diloco(outer: Any, plan: optperm.Every, **options: Any) -> tuple[Any, Any]:
        return optperm.diloco(inner(), outer, plan, axis_name=AXIS, **options), plan

    whole, parts = optperm.Every(PERIOD), optperm.Every(PERIOD, fragments=4, delay=1)
    average = optax.sgd(1.0)
    agn = optperm.agn(inner(), PERIOD, axis_name=AXIS)
    return {
        "in step": (inner(), "in step"),
        "alone": (inner(), "alone"),
        "agn": (agn, whole),
        "diloco, averaging": diloco(average, whole),
        "diloco, outer .7, .9": diloco(None, whole),
        "streaming, mixing .5": diloco(average, parts, mixing=0.5),
        "4 bits": diloco(average, whole, compress=optperm.compress_quantized(4)),
        "top 1/16 at 2 bits": diloco(
            average, whole, compress=optperm.compress_top_k(1 / 16, bits=2)
        ),
    }


class Trainer:
    """Steps of one method on all replicas, compiled once for each kind of exchange."""

    def __init__(self, name: str, tx: Any, plan: Any, mesh: Mesh) -> None:
        """Remembers what to compile."""
        self.tx, self.plan, self.mesh, self.is_agn = tx, plan, mesh, name == "agn"
        self.programs: dict[Any, Any] = {}
        self.sent: list[int] = []

    def step(self, params: Any, opt_state: Any, ids: jax.Array, *, commit: Any) -> tuple[Any, ...]:
        """One replica's step."""
        grads = jax.grad(loss_fn)(params, ids)
        grads = jax.lax.pmean(grads, AXIS) if self.plan == "in step" else grads
        extras = {} if commit is None else {"commit": commit}
        updates, opt_state = self.tx.update(grads, opt_state, params, **extras)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    def __call__(self, number: int, *carry: Any) -> tuple[Any, ...]:
        """All replicas' step of this number, from 1."""
        commit: Any = None
        if isinstance(self.plan, optperm.Every):
            commit = self.plan.at(number)
            commit = bool(commit.send) if self.is_agn else commit
        if commit not in self.programs:
            block = jax.vmap(functools.partial(self.step, commit=commit))
            mapped = jax.shard_map(
                block, mesh=self.mesh, in_specs=P(AXIS), out_specs=P(AXIS), check_vma=False
            )
            compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carry).compile()
            found = find_collectives(compiled.as_text())
            self.programs[commit] = compiled, sum(each.bytes for each in found)
        program, size = self.programs[commit]
        self.sent.append(size)
        return jax.block_until_ready(program(*carry))


def train(steps: int, common: int, seed: int) -> dict[str, tuple[float, float, int]]:
    """For each method nats a byte on what was held out, and bytes sent: mean a step, and most."""
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    on_all = NamedSharding(mesh, P(AXIS))
    data, held = sources()
    test = windows(held, np.random.default_rng(1), 256)
    evaluate = jax.jit(loss_fn)

    def run(trainer: Trainer, params: Any, first: int, last: int) -> tuple[Any, Any]:
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * REPLICAS), params)
        carry = jax.device_put((stacked, jax.vmap(trainer.tx.init)(stacked)), on_all)
        rng = np.random.default_rng((seed, first))
        for number in range(1, last - first + 1):
            ids = windows(data, rng, REPLICAS, BATCH)
            carry = trainer(number, *carry, jax.device_put(ids, on_all))
        return carry

    params = Decoder().init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))
    together = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(RATE, weight_decay=0.01))
    first_of = functools.partial(jax.tree.map, lambda leaf: jnp.asarray(np.asarray(leaf)[0]))
    params = first_of(run(Trainer("start", together, "in step", mesh), params, 0, common)[0])
    print(f"  start: {float(evaluate(params, test)):.3f} nats a byte after {common} common steps")
    results = {}
    for name, (tx, plan) in methods(steps).items():
        trainer = Trainer(name, tx, plan, mesh)
        trained, opt_state = run(trainer, params, common, common + steps)
        at = optperm.center_params(opt_state) if isinstance(plan, optperm.Every) else trained
        loss, sent = float(evaluate(first_of(at), test)), trainer.sent
        results[name] = loss, sum(sent) / len(sent), max(sent)
        print(
            f"  {name:22} {loss:.3f} nats a byte, {results[name][1]:12.1f} bytes a step", flush=True
        )
    return results


def main(arguments: Sequence[str] | None = None) -> dict[str, list[float]]:
    """Trains by every method, prints the table and draws loss over bytes; the losses of all seeds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=400, help="of each method")
    parser.add_argument("--common", type=int, default=200, help="steps in step before that")
    parser.add_argument("--out", default="byte_transformer.png")
    chosen = parser.parse_args(arguments)
    # Where there are too few devices, the processor stands in for four. JAX asks when it starts.
    if "jax_num_cpu_devices" in jax.config.values:
        jax.config.update("jax_num_cpu_devices", REPLICAS)
    every = []
    for seed in range(chosen.seeds):
        print(f"seed {seed}")
        every.append(train(chosen.steps, chosen.common, seed))
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    print(f"{'method':22}  nats a byte  bytes a step     most in one")
    losses = {name: [result[name][0] for result in every] for name in every[0]}
    for name, values in losses.items():
        _, mean, most = every[0][name]
        spread = f" +- {np.std(values):.3f}" if len(values) > 1 else ""
        print(f"{name:22}  {np.mean(values):11.3f}{spread}  {mean:12.1f}  {most:14d}")
        axes.errorbar(max(mean, 100.0), np.mean(values), np.std(values), fmt="o", label=name)
    axes.axhline(np.mean(losses["alone"]), color="gray", linestyle="--")
    axes.set(xscale="log", xlabel="bytes a step (100: none)", ylabel="nats a byte, held out")
    axes.legend(fontsize="small")
    figure.savefig(chosen.out, dpi=120)
    return losses


if __name__ == "__main__":
    main()
