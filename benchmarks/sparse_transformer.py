"""Nats a byte of a small decoder whose kernels have two zeros in each four inputs.

Half of the entries of all kernels are zero, in 2:4 or wherever they are smallest; embeddings, norms and
biases stay dense. All methods train for the same number of steps with clipping and Adam, 5 % of
warm-up, and a rate that falls to 0 by a cosine. It is tuned for each method, with one seed and a third
of the steps, on half of what is held out, and the seeds are measured on the other half.

    python benchmarks/sparse_transformer.py [--data FILE] [--seeds 3] [--steps 612] [--json FILE]
"""

import argparse
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results

import optperm

BATCH, TWELFTHS = 8, 12
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2)
RESULTS = results.Results()


def are_kernels(params: Any) -> Any:
    """Return whether each leaf is a kernel."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: "kernel" in jax.tree_util.keystr(path), params
    )


TWO_OF_FOUR: dict[str, Any] = {"include": are_kernels, "structure": optperm.sparsity.NOfM(2, 4)}
THREE_OF_FOUR = TWO_OF_FOUR | {"structure": optperm.sparsity.NOfM(3, 4)}
Tx = optax.GradientTransformation


def with_masks(optimizer: Tx, steps: Any) -> Tx:
    """Return an optimizer whose masks are set by hand."""
    return optax.chain(optimizer, optperm.mask_elements())


def gradual(optimizer: Tx, steps: Any) -> Tx:
    """Return an optimizer with Zhu and Gupta's ramp from 10 to 75 % of the steps."""

    def ramp(t: jax.Array) -> jax.Array:
        return 1 - (1 - jnp.clip((t / steps - 0.1) / 0.65, 0.0, 1.0)) ** 3

    return optperm.prune_gradually(optimizer, 0.5, ramp, every=10, include=are_kernels)


def straight_through(params: Any) -> Any:
    """Return params in 2:4, with gradients for all entries."""
    return optperm.sparsity.keep_top(params, None, **TWO_OF_FOUR)


class Method(NamedTuple):
    """A row.

    Attributes:
      prunings: After how many twelfths of the steps `prune` is called, with its fraction and options.
      wrap: What makes an optimizer and a number of steps a sparse optimizer.
      forward: What the decoder uses in place of the params.
    """

    prunings: Mapping[int, tuple[float | None, dict[str, Any]]]
    wrap: Callable[[Tx, Any], Tx] = with_masks
    forward: Callable[[Any], Any] = lambda params: params


METHODS = {
    "dense": Method({}),
    "2:4 from the start": Method({0: (None, TWO_OF_FOUR)}),
    "2:4 after half of the steps": Method({6: (None, TWO_OF_FOUR)}),
    "3:4 after a quarter, 2:4 after half": Method(
        {3: (None, THREE_OF_FOUR), 6: (None, TWO_OF_FOUR)}
    ),
    "2:4 straight-through": Method({TWELFTHS: (None, TWO_OF_FOUR)}, forward=straight_through),
    "50 % after half of the steps, ERK": Method({6: (0.5, {"include": are_kernels})}),
    "50 % gradually, ERK": Method({}, wrap=gradual),
}


def adam(rate: Any, steps: Any) -> Tx:
    """Return the optimizer of all rows."""

    def schedule(t: jax.Array) -> jax.Array:
        done = t / steps
        return rate * jnp.minimum(done / 0.05, 1.0) * (1 + jnp.cos(jnp.pi * done)) / 2

    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))


@jax.jit
def initial(seed: Any) -> Any:
    """Return the params before training."""
    ids = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
    return library_bytes.Decoder().init(jax.random.key(seed), ids)


@functools.partial(jax.jit, static_argnames=("wrap", "forward"))
def go_on(carry: Any, batches: Any, rate: Any, steps: Any, *, wrap: Any, forward: Any) -> Any:
    """Return params and state after batches (steps, batch, time): one program for all rates."""
    tx = wrap(adam(rate, steps), steps)

    def step(carry: Any, ids: jax.Array) -> Any:
        params, opt_state = carry
        grads = jax.grad(lambda params: library_bytes.loss_fn(forward(params), ids))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    return jax.lax.scan(step, carry, batches)[0]


def train(method: Method, rate: float, seed: int, steps: int, data: np.ndarray) -> Any:
    """Return the params after training in twelve parts, between which `prune` is called."""
    params = initial(seed)
    opt_state = method.wrap(adam(rate, steps), steps).init(params)
    batches = library_bytes.windows(data, np.random.default_rng((seed, 7)), steps, BATCH)
    for part in range(TWELFTHS + 1):
        if part in method.prunings:
            fraction, options = method.prunings[part]
            params, opt_state = optperm.sparsity.prune(params, opt_state, fraction, **options)
        if part < TWELFTHS:
            chosen = batches[part * steps // TWELFTHS : (part + 1) * steps // TWELFTHS]
            numbers = jnp.float32(rate), jnp.float32(steps)
            params, opt_state = go_on(
                (params, opt_state), chosen, *numbers, wrap=method.wrap, forward=method.forward
            )
    return params


def zeros_of(params: Any) -> tuple[float, int]:
    """Return the sparsity of the kernels, and the most nonzeros in four inputs of an output."""
    flags = jax.tree.leaves(are_kernels(params))
    kernels = [
        np.asarray(w) for w, flag in zip(jax.tree.leaves(params), flags, strict=True) if flag
    ]
    most = max((w != 0).reshape(-1, 4, w.shape[-1]).sum(axis=1).max() for w in kernels)
    return sum((w == 0).sum() for w in kernels) / sum(w.size for w in kernels), int(most)


def main(argv: Sequence[str] | None = None) -> None:
    """Tune each method, train it from each seed, and print its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=pathlib.Path, help="a text, in the place of the library")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=612, help="a multiple of 36")
    results.add_argument(parser)
    options = parser.parse_args(argv)
    data, held = library_bytes.load(options.data)
    name = options.data.stem if options.data else "Python's library"
    evaluate = jax.jit(library_bytes.loss_fn)
    parts = held[: len(held) // 2], held[len(held) // 2 :]
    validation, test = (
        library_bytes.windows(part, np.random.default_rng(index), 256)
        for index, part in enumerate(parts)
    )
    for title, method in METHODS.items():
        tried = {}
        for rate in RATES:
            params = train(method, rate, 0, options.steps // 3, data)
            tried[rate] = float(evaluate(params, validation))
        best = min(RATES, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
        nets = [train(method, best, seed, options.steps, data) for seed in range(options.seeds)]
        losses = [float(evaluate(params, test)) for params in nets]
        sparsities, most = zip(*map(zeros_of, nets), strict=True)
        RESULTS.row(
            f"Bytes of {name}: {options.steps} steps, {options.seeds} seeds",
            method=title,
            nats_a_byte=f"{np.mean(losses):.3f} ± {np.std(losses, ddof=min(len(losses) - 1, 1)):.3f}",
            rate=f"{best:g}",
            zeros_of_the_kernels=f"{np.mean(sparsities):.2%}",
            most_nonzeros_in_four_inputs=max(most),
        )
        RESULTS.row(
            f"Nats a byte on the validation part by the rate: {options.steps // 3} steps, one seed",
            method=title,
            **{f"{rate:g}": f"{loss:.3f}" for rate, loss in tried.items()},
        )
        grid = ", ".join(f"{rate:g}: {loss:.3f}" for rate, loss in tried.items())
        print(f"{title:36} {grid}; {best:g} {losses} {sparsities} {most}", flush=True)
        RESULTS.write(options.json)


if __name__ == "__main__":
    main()
