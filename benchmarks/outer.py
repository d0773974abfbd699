"""The outer optimizers of DiLoCo: held-out loss with few and with many commits, on two models.

Four replicas train an MLP on images and a small decoder on the bytes of Python's standard library, by
`jax.vmap` in one process, all with AdamW and a cosine. `alone` is one replica without commits, for the
same number of steps with its own batch size, and so for the same time: the baseline to beat. `in step`
averages the gradients of every step.

For each setting and method the rate of the replicas is the best of a printed grid on held-out data of
its own, with one seed. The tables have the mean and the standard error of the seeds on other held-out
data: at this rate, and at the rate that is best for one replica alone, which a user has before the
first commit. A method loses to one replica alone if the mean difference of their losses, seed by seed,
is above its standard error.

    python benchmarks/outer.py [--data mnist.npz] [--seeds 3] [--json FILE [--resume]]
"""

import argparse
import functools
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results

import optperm

AXIS, REPLICAS = "replica", 4
RESULTS = results.Results()
# By model, baseline (None for DiLoCo) and steps: what trains.
Runs = dict[tuple[str, str | None, int], Callable[..., tuple[float, ...]]]
BASELINES = {"alone": 1, "in step": REPLICAS}  # how many batches one replica takes in a step
# Rate and Nesterov momentum.
OUTER = {
    "averaging": (1.0, 0.0),
    "0.9, 0.3": (0.9, 0.3),
    "0.8, 0.5": (0.8, 0.5),
    "0.9, 0.8": (0.9, 0.8),
    "0.7, 0.9": (0.7, 0.9),
}
# A model, steps, and steps from one commit to the next.
SETTINGS = (
    ("MLP", 100, 10),
    ("MLP", 1000, 100),
    ("MLP", 1000, 10),
    ("decoder", 100, 10),
    ("decoder", 500, 50),
    ("decoder", 500, 5),
)
RATES = (1e-3, 3e-3, 1e-2, 3e-2)
TITLES = {
    "own": "Held-out loss of outer optimizers, each at its best rate",
    "alone": "Held-out loss of outer optimizers, all at the best rate of one replica alone",
}


class Model(NamedTuple):
    """A network and its data.

    Attributes:
      initial: From a seed to params.
      loss_fn: The mean loss of params for a batch.
      batch_of: From the data to train on, a key and a size to a batch.
      batch: The size of a batch of one replica.
      data: What is trained on, what rates are chosen on, and what is tested.
    """

    initial: Callable[[Any], Any]
    loss_fn: Callable[[Any, Any], jax.Array]
    batch_of: Callable[[Any, jax.Array, int], Any]
    batch: int
    data: tuple[Any, Any, Any]


def of_images(path: pathlib.Path | None) -> Model:
    """Return an MLP with 64 hidden units."""
    _, (x, y), test = images.load(path)
    kept = len(x) * 9 // 10
    shape = x.shape[1:]

    def batch_of(data: images.Data, key: jax.Array, size: int) -> images.Data:
        rows = jax.random.randint(key, (size,), 0, len(data[0]))
        return data[0][rows], data[1][rows]

    return Model(
        initial=lambda seed: images.initial(seed, shape, hidden=(64,)),
        loss_fn=images.loss_fn,
        batch_of=batch_of,
        batch=16,
        data=((x[:kept], y[:kept]), (x[kept:], y[kept:]), test),
    )


def of_bytes() -> Model:
    """Return a decoder of `library_bytes`."""
    whole, held = library_bytes.load()
    choice, test = (
        jnp.asarray(library_bytes.windows(held, np.random.default_rng(i), 256)) for i in (2, 1)
    )
    width = library_bytes.CONTEXT + 1

    def batch_of(data: jax.Array, key: jax.Array, size: int) -> jax.Array:
        starts = jax.random.randint(key, (size, 1), 0, len(data) - width)
        return data[starts + jnp.arange(width)].astype(jnp.int32)

    def initial(seed: Any) -> Any:
        nothing = jnp.zeros((1, library_bytes.CONTEXT), jnp.int32)
        return library_bytes.Decoder().init(jax.random.key(seed), nothing)

    return Model(
        initial=initial,
        loss_fn=library_bytes.loss_fn,
        batch_of=batch_of,
        batch=2,
        data=(jnp.asarray(whole), choice, test),
    )


def trainer(model: Model, baseline: str | None, steps: int) -> Callable[..., tuple[float, ...]]:
    """Return a function of outer numbers and a period (of DiLoCo), a rate and a seed.

    It returns the losses to choose by and to test. One program is for all outer optimizers and periods,
    since compiling takes longer than training.
    """
    count, size = REPLICAS, model.batch
    if baseline is not None:
        count, size = 1, size * BASELINES[baseline]

    @jax.jit
    def losses(data: Any, *numbers: Any) -> tuple[jax.Array, jax.Array]:
        *how, rate, seed = numbers
        fall = optax.cosine_decay_schedule(1.0, steps, 0.05)
        tx: Any = optax.adamw(lambda t: rate * fall(t))
        if baseline is None:
            (outer_rate, momentum), every = how
            center = optax.sgd(outer_rate, momentum=momentum, nesterov=True)
            tx = optperm.diloco(tx, center, every=lambda commits: every, axis_name=AXIS)
        start = model.initial(seed)

        def step(carried: Any, key: jax.Array) -> Any:
            params, state = carried
            grads = jax.grad(model.loss_fn)(params, model.batch_of(data[0], key, size))
            updates, state = tx.update(grads, state, params)
            return (optperm.apply_updates(params, updates, state), state), None

        def on_replica(keys: jax.Array) -> Any:
            return jax.lax.scan(step, (start, tx.init(start)), keys)[0][0]

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), (count, steps))
        ends = jax.vmap(on_replica, axis_name=AXIS)(keys)
        # The last step commits, so all replicas are equal.
        params = jax.tree.map(lambda leaf: leaf[0], ends)
        return model.loss_fn(params, data[1]), model.loss_fn(params, data[2])

    return lambda *numbers: tuple(map(float, losses(model.data, *numbers)))


def compare(name: str, model: Model, steps: int, every: int, seeds: int, runs: Runs) -> None:
    """Print and keep a row of both tables."""
    setting = {"model": name, "steps": steps, "commits": steps // every}
    tests: dict[str, dict[str, np.ndarray]] = {"own": {}, "alone": {}}
    rates = dict[str, float]()
    for method in (*BASELINES, *OUTER):
        baseline = method if method in BASELINES else None
        key = name, baseline, steps
        train = runs.setdefault(key, functools.cache(trainer(model, baseline, steps)))
        how = (OUTER[method], every) if baseline is None else ()
        run = functools.partial(train, *how)
        by_rate = {rate: run(rate, seeds)[0] for rate in RATES}
        rates[method] = min(by_rate, key=lambda rate: np.nan_to_num(by_rate[rate], nan=np.inf))
        for kind, rate in (("own", rates[method]), ("alone", rates["alone"])):
            tests[kind][method] = np.array([run(rate, seed)[1] for seed in range(seeds)])
        grid = " ".join(f"{rate:g}: {loss:.3f}" for rate, loss in by_rate.items())
        print(f"{setting} {method}, grid {grid}", flush=True)
    for kind, title in TITLES.items():
        cells, losing = {}, []
        for method, found in tests[kind].items():
            excess = found - tests[kind]["alone"]
            # A loss that is not finite loses too.
            if method != "alone" and not excess.mean() <= standard_error(excess):
                losing.append(method)
            cells[method] = f"{found.mean():.3f} ± {standard_error(found):.3f}"
            if kind == "own":
                cells[method] += f" ({rates[method]:g})"
        row = setting | cells | {"lose to alone": "; ".join(losing) or "none"}
        RESULTS.row(title, **row)
        print(f"{title}\n  {row}", flush=True)


def standard_error(found: np.ndarray) -> float:
    """Return the standard error of the mean; 0 of one seed."""
    return float(np.std(found, ddof=1) / np.sqrt(len(found))) if len(found) > 1 else 0.0


def main() -> None:
    """Compare the outer optimizers in each setting."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=pathlib.Path, help="an npz of images; without, 8 x 8 digits")
    parser.add_argument("--seeds", type=int, default=3, help="trainings to average")
    parser.add_argument("--layers", type=int, default=1, help="layers of the decoder")
    parser.add_argument("--width", type=int, default=48, help="its width, a multiple of 4")
    parser.add_argument("--resume", action="store_true", help="keep the rows in the file of --json")
    results.add_argument(parser)
    chosen = parser.parse_args()
    library_bytes.LAYERS, library_bytes.WIDTH = chosen.layers, chosen.width
    if chosen.resume:
        RESULTS.resume(chosen.json)
    runs: Runs = {}
    models = {"MLP": of_images(chosen.data), "decoder": of_bytes()}
    for name, steps, every in SETTINGS:
        done = {"model": name, "steps": str(steps), "commits": str(steps // every)}
        if not RESULTS.has(TITLES["alone"], **done):
            compare(name, models[name], steps, every, chosen.seeds, runs)
            RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
