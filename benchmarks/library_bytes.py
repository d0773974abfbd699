"""The bytes of Python's standard library or of a text, and a small decoder that learns them."""

import os
import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

CONTEXT, WIDTH, LAYERS, HEADS = 64, 96, 3, 4


class Decoder(nn.Module):
    """A transformer that predicts the next byte from the bytes before it."""

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


def initial(seed: Any) -> Any:
    """Return the initial params of a seed."""
    return Decoder().init(jax.random.key(seed), jnp.zeros((1, CONTEXT), jnp.int32))


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
