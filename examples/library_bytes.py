"""The bytes of Python's own standard library and a small decoder, for the example that learns them."""

import json
import os
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from matplotlib.figure import Figure

CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 3, 4
# By method, for each seed: nats a byte on what was held out, bytes a step in the mean, most in one.
Kept = dict[str, list[tuple[float, float, int]]]


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


def load() -> tuple[np.ndarray, np.ndarray]:
    """The bytes of the standard library's modules to train on, and those of one module in ten."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    held = [path.read_bytes() for path in files[::10]]
    kept = [path.read_bytes() for index, path in enumerate(files) if index % 10]
    return np.frombuffer(b"\n".join(kept), np.uint8), np.frombuffer(b"\n".join(held), np.uint8)


def windows(data: np.ndarray, rng: np.random.Generator, *lead: int) -> np.ndarray:
    """Random stretches of one byte more than the decoder sees."""
    starts = rng.integers(0, len(data) - CONTEXT - 1, lead)
    return data[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


@matplotlib.style.context("optperm.pictures")
def report(found: Kept, out: pathlib.Path, kept: pathlib.Path | None = None) -> None:
    """Prints the table, draws loss over bytes, and keeps what was found."""
    if kept is not None:
        kept.write_text(json.dumps(found, indent=1) + "\n")
    figure = Figure(figsize=(6, 4.2))
    axes = figure.add_subplot(xscale="log", xlabel="bytes that a device sends a step")
    axes.set_ylabel("nats a byte, held out")
    print(f"{'method':36}  nats a byte  bytes a step  most in one")
    for index, (name, results) in enumerate(found.items()):
        (losses, sent, most), marker = zip(*results, strict=True), "os^Dv"[index % 5]
        mean, deviation = np.mean(losses), np.std(losses)
        print(f"{name:36}  {mean:5.3f} {deviation:5.3f}  {sent[0]:12.1f}  {most[0]:11d}")
        # What sends nothing has no place on a logarithmic axis.
        label = name if sent[0] else f"{name} (sends none)"
        axes.errorbar(max(sent[0], 1e3), mean, deviation, fmt=marker, capsize=3, label=label)
    axes.set_title(f"mean and standard deviation of {len(losses)} seeds")
    figure.legend(loc="outside right center")
    figure.savefig(out)
