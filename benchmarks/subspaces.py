"""Training in the subspace of a trajectory compared with SGD, Adam and averages, on images.

The network is an MLP on gray images (scikit-learn's digits by default), or a convolutional network (8,
16 and 32 channels) on color images. All methods take the same number of gradients; a trial of a line
search counts as a third of a gradient. SGD with momentum, with gradients clipped to norm 1, and Adam
have a rate that falls to 0 by a cosine. SWA is the mean of ten snapshots from the last quarter of SGD at
a constant rate, and EMA is the exponential mean of its params over a tenth of the steps. `dldr` runs SGD
for two thirds of the steps, with 41 snapshots; then the second phase begins, in 20 dimensions (41 for
`twa`).

The labels are all right, few, or partly random: a fraction of 0.2 is drawn at random, as in the scripts
of DLDR's authors. Each method takes the hyperparameters of its printed grid that are best on a
validation split, whose labels are as wrong as the others, with one seed and a third of the steps.
Seconds are the processor seconds of a training run, without compilation.

    python benchmarks/subspaces.py [--data mnist.npz] [--examples 10000] [--steps 600] [--seeds 3]
"""

import argparse
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any

import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import results

import optperm

SNAPSHOTS = 40
RESULTS = results.Results()


def momentum(rate: Any) -> optax.GradientTransformation:
    """SGD with momentum and clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(rate, momentum=0.9))


def swa(steps: int, rate: Any) -> optax.GradientTransformation:
    """Keep ten snapshots of the last quarter."""
    return optax.chain(momentum(rate), optperm.record_trajectory(max(steps // 40, 1), 10))


def mean_of_snapshots(_: Any, state: Any) -> Any:
    """Return their mean."""
    snapshots, count = optperm.subspace.trajectory(state)
    return jax.tree.map(lambda rows: jnp.sum(rows, axis=0) / count, snapshots)


def ema(steps: int, rate: Any) -> optax.GradientTransformation:
    """Keep an exponential mean of the params."""

    def follow(updates: Any, mean: Any, params: Any) -> Any:
        return updates, optax.incremental_update(params, mean, min(10 / steps, 1.0))

    follower = optax.GradientTransformation(lambda p: jax.tree.map(jnp.copy, p), follow)
    return optax.chain(momentum(rate), follower)


def after_sgd(second: Callable[..., Any], restart: Any = "last") -> Callable[..., Any]:
    """Make `dldr` from a second phase by its snapshots, its steps and its numbers."""

    def make(steps: int, rate: Any, *numbers: Any) -> optax.GradientTransformation:
        every = max(2 * steps // 3 // SNAPSHOTS, 1)
        m = min(SNAPSHOTS, 2 * steps // 3 // every) + 1
        then = second(m, steps - (m - 1) * every, *numbers)
        return optperm.dldr(momentum(rate), then, every=every, num_snapshots=m, restart=restart)

    return make


def falling(optimizer: Callable[..., Any]) -> Callable[..., Any]:
    """Give an optimizer a rate that falls to 0."""
    return lambda steps, rate: optimizer(optax.cosine_decay_schedule(rate, steps))


cosine = falling(momentum)
PAPER = {"rho": 0.4, "alpha": 0.0, "max_search_steps": 20, "line_search": "mindspore"}
RATES, ALPHAS = (0.03, 0.1, 0.3), (0.0, 0.003, 0.03)
ONE = ((0.01, *RATES),)
# By name: from the steps and numbers to an optimizer, the grids of the numbers, and from params and the
# optimizer's state to what it has found.
METHODS: dict[str, tuple[Any, ...]] = {
    "SGD, cosine": (cosine, ONE),
    "Adam, cosine": (falling(optax.adam), ((1e-3, 3e-3, 1e-2, 3e-2),)),
    "SWA": (swa, ONE, mean_of_snapshots),
    "EMA": (ema, ONE, lambda _, state: state[-1]),
    "dldr, dim_reduce": (
        after_sgd(lambda m, _, alpha: optperm.dim_reduce(n_components=m // 2, alpha=alpha)),
        (RATES, ALPHAS),
    ),
    "dldr, the paper's P-BFGS": (
        after_sgd(lambda m, _: optperm.dim_reduce(n_components=m // 2, **PAPER), "first"),
        ONE,
    ),
    "dldr, project": (
        after_sgd(lambda m, rest, rate: optperm.project(cosine(rest, rate), n_components=m // 2)),
        (RATES, RATES),
    ),
    "dldr, twa": (
        after_sgd(lambda m, rest, rate: optperm.twa(cosine(rest, rate), n_components=m), "mean"),
        (RATES, RATES),
    ),
}


def trials_of(state: Any) -> jax.Array:
    """How often the last step evaluated the loss."""

    def is_search(node: Any) -> bool:
        return isinstance(node, optperm.subspace.DimReduceState)

    found = jax.tree.leaves(state, is_leaf=is_search)
    return sum((node.num_trials for node in found if is_search(node)), start=jnp.int32(0))


@functools.partial(jax.jit, static_argnames=("name", "steps"))
def trained(name: str, steps: int, numbers: Any, params: Any, batches: Any) -> Any:
    """Train while the budget of gradients lasts: one program for all numbers and seeds."""
    make, _, *ends = METHODS[name]
    tx = optax.with_extra_args_support(make(steps, *numbers))

    def has_budget(carry: Any) -> jax.Array:
        return carry[2] + 1 <= steps

    def step(carry: Any) -> Any:
        params, state, spent, t = carry
        batch = jax.tree.map(lambda leaf: leaf[t], batches)
        e = optperm.evaluate(images.loss_fn, params, batch)
        updates, state = tx.update(e.grad, state, params, **e.extra_args)
        params = optperm.apply_updates(params, updates, state)
        return params, state, spent + 1 + trials_of(state) / 3, t + 1

    start = params, tx.init(params), jnp.float32(0.0), jnp.int32(0)
    params, state, *_ = jax.lax.while_loop(has_budget, step, start)
    return ends[0](params, state) if ends else params


def compare(title: str, options: argparse.Namespace, train: Any, test: Any) -> None:
    """Print and keep a row for each method."""
    print(f"\n{title}", flush=True)
    for name in options.methods:
        seconds = []

        def fit(
            numbers: Any, seed: int, steps: int, data: Any, name: str = name, seconds: Any = seconds
        ) -> Any:
            chosen = images.batches(len(data[0]), options.batch, steps, seed)
            batches = tuple(leaf[chosen] for leaf in data)
            params = images.initial(seed, data[0].shape[1:], channels=(8, 16, 32))
            start = time.process_time()
            params = jax.block_until_ready(trained(name, steps, numbers, params, batches))
            seconds.append(time.process_time() - start)
            return params

        best, tried = images.tune(itertools.product(*METHODS[name][1]), fit, options.steps, train)
        seconds.clear()
        nets = [fit(best, seed, options.steps, train) for seed in range(options.seeds)]
        right = images.spread([images.accuracy(params, test) for params in nets])
        of = optax.softmax_cross_entropy_with_integer_labels
        x, y = (leaf[:5_000] for leaf in train)
        loss = images.spread([float(of(images.predict(net, x), y).mean()) for net in nets])
        cells = {
            "test_accuracy": right,
            "training_loss": loss,
            "seconds": f"{min(seconds):.3f}",
            "numbers": images.text(best),
            "validation_of_the_grid": images.shown(tried),
        }
        RESULTS.row(title, method=name, **cells)
        RESULTS.write(options.json)
        print(f"  {name:26}", *cells.values(), sep="  ", flush=True)


def main() -> None:
    """Print the tables that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    images.add_arguments(parser)
    kinds = ["right", "few", "wrong"]
    parser.add_argument("--labels", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("--few", type=int, default=100, help="how many are few")
    parser.add_argument("--wrong", type=float, default=0.2, help="the fraction drawn at random")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    results.add_argument(parser)
    options = parser.parse_args()
    source, (x, y), test = images.load(options.data, options.examples)
    rng = np.random.default_rng(0)
    is_drawn = rng.random(len(y)) < options.wrong
    wrong = jnp.where(is_drawn, rng.integers(0, 10, len(y)), y)
    sets = {
        "right": ((x, y), f"{len(x)} images"),
        "few": ((x[: options.few], y[: options.few]), f"{options.few} images"),
        "wrong": (
            (x, wrong),
            f"{len(x)} images, {options.wrong:.0%} of the labels drawn at random",
        ),
    }
    for kind in options.labels:
        train, shown = sets[kind]
        steps = f"{options.steps} steps of {options.batch}, {options.seeds} seeds"
        compare(f"{source}, {shown}, {steps}", options, train, test)


if __name__ == "__main__":
    main()
