"""The bytes of Python's standard library or of a text, and a small decoder that learns them."""

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
# Of each method: mean and deviation of nats a byte, the bytes of a step in the mean, the most in one.
Rows = dict[str, tuple[float, float, float, int]]


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


def load(text: pathlib.Path | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes to test: a text and its last tenth, or modules and one in ten."""
    if text is not None:
        whole = np.frombuffer(text.read_bytes(), np.uint8)
        return whole[: len(whole) * 9 // 10], whole[len(whole) * 9 // 10 :]
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    held = [path.read_bytes() for path in files[::10]]
    kept = [path.read_bytes() for index, path in enumerate(files) if index % 10]
    return np.frombuffer(b"\n".join(kept), np.uint8), np.frombuffer(b"\n".join(held), np.uint8)


def windows(data: np.ndarray, rng: np.random.Generator, *lead: int) -> np.ndarray:
    """Random stretches of one byte more than the decoder sees."""
    starts = rng.integers(0, len(data) - CONTEXT - 1, lead)
    return data[starts[..., None] + np.arange(CONTEXT + 1)].astype(np.int32)


def kept(path: pathlib.Path) -> Rows:
    """What is kept in a file of benchmarks/results."""
    rows = json.loads(path.read_text())["tables"][0]["rows"]
    return {
        name.replace("`", ""): (
            *map(float, nats.split("±")),
            *(int(number.replace(",", "")) for number in sizes),
        )
        for name, _, nats, *sizes in rows
    }


def rows(every: list[dict[str, tuple[float, float, int]]]) -> Rows:
    """Of what was found by each seed: nats a byte, and the bytes of a step."""
    found = {}
    for name, (_, *sizes) in every[0].items():
        losses = [result[name][0] for result in every]
        found[name] = float(np.mean(losses)), float(np.std(losses)), *sizes
    return found


@matplotlib.style.context("optperm.pictures")
def report(found: Rows, out: pathlib.Path) -> None:
    """Prints the table, and draws loss over bytes."""
    figure = Figure(figsize=(6, 4.6))
    axes = figure.add_subplot(xscale="log", xlabel="bytes that a device sends a step")
    axes.set(ylabel="nats a byte, held out", title="mean and standard deviation of the seeds")
    print(f"{'method':42}  nats a byte  bytes a step  most in one")
    for index, (name, (mean, deviation, sent, most)) in enumerate(found.items()):
        print(f"{name:42}  {mean:5.3f} {deviation:5.3f}  {sent:12.1f}  {most:11d}")
        # What sends nothing has no place on a logarithmic axis.
        label, at = (name, sent) if sent else (f"{name} (sends nothing)", 1e3)
        axes.errorbar(at, mean, deviation, fmt="os^Dv"[index % 5], capsize=3, label=label)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(out)
