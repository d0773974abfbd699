"""SGPerm alone trains networks of 2, 3, 4 or 16 values: training only decides the place of each value.

The size of a network is the seed and the logarithm of the number of arrangements. For comparison, Adam
trains freely, and with layers rounded to as many values (k-means). It draws accuracy over bits a weight.

    python benchmarks/sgperm_values.py [--steps 2000] [--seeds 3] [--hidden 64] [--out sgperm-values.png]
"""

import argparse
import math
from collections import defaultdict
from statistics import NormalDist
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits import MLP, accuracy, cross_entropy, load
from matplotlib import figure, style
from permutation import rounded

import optperm

VALUES = (2, 3, 4, 16)


def draw(model: MLP, seed: int, count: int | None) -> Any:
    """Initial params: of `count` values, quantiles of a normal distribution, or without it normal."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64)))["params"]
    rng = np.random.default_rng(seed)

    def leaf(like: Any) -> jax.Array:
        scale = math.sqrt(2 / like.shape[0]) if like.ndim > 1 else 0.1
        quantiles = [NormalDist().inv_cdf((i + 0.5) / (count or 1)) for i in range(count or 1)]
        values = rng.choice(quantiles, like.shape) if count else rng.normal(size=like.shape)
        return jnp.asarray(scale * values, jnp.float32)

    return jax.tree.map(leaf, shapes)


def train(model: MLP, tx: Any, params: Any, steps: int, seed: int) -> Any:
    """Steps of batches of 64 drawn at random."""
    x, y = map(jnp.asarray, load()[0])

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        rows = jax.random.choice(key, len(x), (64,))
        params, opt_state = carry
        loss_fn = lambda p: cross_entropy(model.apply({"params": p}, x[rows]), y[rows])  # noqa: E731
        updates, opt_state = tx.update(jax.grad(loss_fn)(params), opt_state, params)
        return (optperm.apply_updates(params, updates, opt_state), opt_state), None

    keys = jax.random.split(jax.random.key(seed), steps)
    return jax.jit(lambda p: jax.lax.scan(step, (p, tx.init(p)), keys)[0][0])(params)


def bits(params: Any) -> float:
    """Bits a weight of an arrangement: log2 of n! / (c_1! c_2! ...) for each weight vector."""
    leaves = [w.T.reshape(-1, len(w)) for w in jax.tree.leaves(params)]
    sizes = [np.unique(vector, return_counts=True)[1] for leaf in leaves for vector in leaf]
    nats = [math.lgamma(sum(c) + 1) - sum(math.lgamma(each + 1) for each in c) for c in sizes]
    return sum(nats) / math.log(2) / sum(map(sum, sizes))


@style.context("optperm.pictures")
def main(argv: list[str] | None = None) -> dict[str, list[tuple[float, float]]]:
    """Trains, prints and draws; returns bits a weight and the mean accuracy of each network."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="sgperm-values.png", help="the file for the picture")
    parser.add_argument("--steps", type=int, default=2000, help="of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings to average")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units")
    options = parser.parse_args(argv)
    model, (_, (x, y)) = MLP(hidden=options.hidden), load()
    found: dict[tuple[str, float], list[float]] = defaultdict(list)

    def note(name: str, size: float, params: Any) -> None:
        found[name, size].append(float(accuracy(model.apply({"params": params}, x), y)))

    permute = optperm.sgperm(1.0, momentum=0.99)
    for seed in range(options.seeds):
        for count in (*VALUES, None):
            start, size = draw(model, seed, count), round(bits(draw(model, 0, count)), 2)
            note("permuted", size, train(model, permute, start, options.steps, seed))
        note("Adam", 32, moved := train(model, optax.adam(1e-3), start, options.steps, seed))
        note("Adam", 16, jax.tree.map(lambda w: np.float32(np.float16(w)), moved))  # on any CPU
        for count in VALUES:
            note("Adam, rounded", round(math.log2(count), 2), rounded(moved, count, 30))
    curves = defaultdict(list)
    for (name, size), reached in sorted(found.items()):
        curves[name].append((size, float(np.mean(reached))))
        print(f"{name}: {size:g} bits a weight, test accuracy {np.mean(reached):.3f}")
    axes = (picture := figure.Figure()).add_subplot(
        title="left to right: 2, 3, 4, 16 and any values"
    )
    for name, points in curves.items():
        axes.semilogx(*zip(*points, strict=True), "o-", base=2, label=name)
    axes.set(xlabel="bits a weight, beside the seed and the values", ylabel="test accuracy")
    axes.xaxis.set_major_formatter("{x:g}")
    picture.legend(loc="outside lower center", ncols=3)
    picture.savefig(options.out)
    return curves


if __name__ == "__main__":
    main()
