"""Training by `fit`.

- cost: the time of a step of `optperm.training.fit` over that of the same step in a loop by hand: one
  jitted `jax.lax.scan` over 100 steps at a time for arrays, a jitted step for each batch of an iterable.
  Compilation does not count; the runs take turns, and the shortest one counts;
- kills: SIGKILL ends a program that trains with `fit`, within a step, during a checkpoint or while it
  starts, and it starts again with `resume=True`. At the end its params, optimizer state and losses must
  equal those of an uninterrupted run, bit for bit, and its checkpoints must be whole;
- methods: the accuracy and the cost of all methods with their defaults on the digits, as means over
  seeds. With `--picture` it draws the training loss over the epochs, and each seed's test accuracy.

    python benchmarks/training.py [--only PART ...] [--json FILE]
"""

import argparse
import functools
import itertools
import math
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import images
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import results
from results import picture
from timing import seconds, take_turns

import optperm
from optperm.training import Checkpoints, TrainState, fit, shuffled

EXAMPLES, FEATURES, CLASSES, BATCH = 12800, 64, 10, 128
STEPS = EXAMPLES // BATCH  # an epoch, and a call by hand
RESULTS = results.Results()


# What fit costs.
def examples() -> dict[str, np.ndarray]:
    """Return random examples with labels that can be learned."""
    x = np.random.default_rng(0).normal(size=(EXAMPLES, FEATURES)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :CLASSES], axis=1).astype(np.int32)}


DATA = examples()


def batches(epoch: int) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of `fit`'s shuffles, gathered on the host."""
    for hand in np.asarray(shuffled(0, epoch, EXAMPLES)).reshape(STEPS, BATCH):
        yield {name: leaf[hand] for name, leaf in DATA.items()}


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """Return the mean cross-entropy of an MLP."""
    x = batch["x"]
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params[-1], batch["y"])
    return losses.mean()


def by_hand(state: TrainState) -> tuple[Callable[[int], Any], Callable[[int], Any]]:
    """Return the loops that one would write, their states donated: over arrays, and over batches."""

    def step(state: Any, batch: Any) -> Any:
        e = optperm.evaluate(loss_fn, state.params, batch)
        return state.apply_gradients(grads=e.grad, **e.extra_args), e.value

    def call(state: Any, order: jax.Array, data: Any) -> Any:
        def body(state: Any, hand: jax.Array) -> Any:
            return step(state, jax.tree.map(lambda leaf: leaf[hand], data))

        return jax.lax.scan(body, state, order)

    scanned, jitted = jax.jit(call, donate_argnums=0), jax.jit(step, donate_argnums=0)
    on_device = jax.tree.map(jnp.asarray, DATA)

    def arrays(epochs: int) -> Any:
        current, losses = jax.tree.map(jnp.copy, state), []
        for epoch in range(1, epochs + 1):
            order = shuffled(0, epoch, EXAMPLES).reshape(STEPS, BATCH)
            current, loss = scanned(current, order, on_device)
            losses.append(np.asarray(loss))
        return current

    def iterable(epochs: int) -> Any:
        current, losses = jax.tree.map(jnp.copy, state), []
        for epoch in range(1, epochs + 1):
            for batch in batches(epoch):
                current, loss = jitted(current, batch)
                losses.append(loss)
        jax.device_get(losses)
        return current

    return arrays, iterable


def compare_costs(sizes: list[int], repetitions: int, least: float) -> None:
    """Show microseconds of a step by hand and by fit, for each size and source of batches."""
    for hidden in sizes:
        widths, keys = (FEATURES, hidden, hidden, CLASSES), jax.random.split(jax.random.key(0), 3)
        shapes = itertools.pairwise(widths)
        init = jax.nn.initializers.he_normal()
        params = [init(key, shape) for key, shape in zip(keys, shapes, strict=True)]
        state = TrainState.create(apply_fn=None, params=params, tx=optax.adam(1e-3))
        state = jax.device_put(state, jax.devices()[0])  # one device by choice
        arrays, iterable = by_hand(state)

        def of_arrays(epochs: int, state: Any = state, **options: Any) -> Any:
            return fit(state, loss_fn, DATA, epochs=epochs, batch_size=BATCH, **options).state

        def of_batches(epochs: int, state: Any = state) -> Any:
            return fit(state, loss_fn, batches, epochs=epochs).state

        peers = {
            "arrays": (arrays, of_arrays),
            "arrays, callbacks={100: f}": (
                arrays,
                lambda n, f=of_arrays: f(n, callbacks={100: _ignore}),
            ),
            "arrays, callbacks={1: f}": (
                arrays,
                lambda n, f=of_arrays: f(n, callbacks={1: _ignore}),
            ),
            "iterable": (iterable, of_batches),
        }
        for name, (hand, fitted) in peers.items():
            hand(1), fitted(1)  # these compile
            count = max(1, round(least / min(seconds(lambda h=hand: h(1)) for _ in range(3))))
            calls = {"hand": lambda h=hand, n=count: h(n), "fit": lambda f=fitted, n=count: f(n)}
            times = take_turns(calls, repetitions, warm_up=0)
            one, other = (1e6 * min(taken) / (count * STEPS) for taken in times.values())
            cells = {
                "hand_us": f"{one:.1f}",
                "fit_us": f"{other:.1f}",
                "ratio": f"{other / one:.3f}",
            }
            RESULTS.show("A step of fit over one by hand", hidden=hidden, batches=name, **cells)


def _ignore(event: Any) -> None:
    pass


# Kills.
STEPS_PER_EPOCH, PAUSE = 50, 0.2


def train_on(folder: pathlib.Path, devices: int, epochs: int, pause: float) -> None:
    """Train, or go on, until the end, and write what came of it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8 * STEPS_PER_EPOCH, 32)).astype(np.float32)
    data = {"x": x, "y": x @ rng.normal(size=(32, 4)).astype(np.float32)}
    shapes = {"hidden": (32, 64), "out": (64, 4)}
    params = {k: jnp.asarray(0.1 * rng.normal(size=s), jnp.float32) for k, s in shapes.items()}

    def loss_fn(params: Any, batch: Any, *, rng: Any) -> jax.Array:
        hidden = jax.nn.relu(batch["x"] @ params["hidden"])
        kept = jax.random.bernoulli(rng, 0.9, hidden.shape)
        return ((jnp.where(kept, hidden, 0.0) @ params["out"] - batch["y"]) ** 2).mean()

    tx = optax.chain(optperm.svrg(0.5), optax.adam(1e-3))
    print("begun", flush=True)
    result = fit(
        TrainState.create(apply_fn=None, params=params, tx=tx, rng=jax.random.key(0)),
        loss_fn,
        data,
        epochs=epochs,
        batch_size=8,
        mesh=jax.make_mesh((devices,), ("replica",)) if devices > 1 else None,
        callbacks={
            "epoch_start": optperm.variance.take_snapshot,
            5: lambda event: time.sleep(pause) if pause else None,
        },
        checkpoints=Checkpoints(folder / "kept", every=7, keep=3, resume=True),
    )
    assert result.state is not None
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(result.state.replace(rng=None))]
    np.savez(folder / "result.npz", *leaves, loss=result.history.steps["loss"])


def run(folder: pathlib.Path, chosen: argparse.Namespace, kill_after: float | None) -> bool:
    """Start the program; return whether it came to its end before it was killed."""
    pause = 0.0 if kill_after is None else PAUSE
    command = [sys.executable, __file__, "--train", str(folder), "--pause", str(pause)]
    command += ["--devices", str(chosen.devices), "--epochs", str(chosen.epochs or 40)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        program.stdout.readline()  # it has begun
        try:
            code = program.wait(kill_after)
        except subprocess.TimeoutExpired:
            program.kill()
            return False
    if code:
        raise SystemExit(f"the program ended with {code}")
    return True


def compare_killed(chosen: argparse.Namespace) -> None:
    """Kill, go on, and compare."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name:
        killed, alone = pathlib.Path(name, "killed"), pathlib.Path(name, "alone")
        for folder in (killed, alone):
            folder.mkdir()
        run(alone, chosen, None)
        kills = 0
        # The run may come to its end before all kills
        while kills < chosen.kills and not run(killed, chosen, draw.uniform(0.0, chosen.life)):
            kills += 1
            kept = [int(p.name) for p in (killed / "kept").glob("*") if p.name.isdecimal()]
            print(f"killed; the last checkpoint is of step {max(kept, default=0)}", flush=True)
        run(killed, chosen, None)
        with np.load(killed / "result.npz") as one, np.load(alone / "result.npz") as other:
            same = all(one[key].tobytes() == other[key].tobytes() for key in other.files)
            num_steps = other["loss"].size
        manager = ocp.CheckpointManager(killed / "kept")
        for step in manager.all_steps():  # each is whole
            items = {"state": ocp.args.StandardRestore(), "history": ocp.args.StandardRestore()}
            manager.restore(step, args=ocp.args.Composite(**items, run=ocp.args.JsonRestore()))
    cells = {"devices": chosen.devices, "kills": kills, "steps": num_steps}
    RESULTS.show(
        "Killed and resumed runs, compared with uninterrupted runs", **cells, same_bits=same
    )
    if not same:
        raise SystemExit(1)


# All methods.
class Task(NamedTuple):
    """What a method may have to know of its run."""

    steps: int
    seed: int
    num_data: int
    batch_size: int


def by_rate(direction: optax.GradientTransformation, rate: float) -> Any:
    """Return an optimizer that takes steps along a direction."""
    return optax.chain(direction, optax.scale_by_learning_rate(rate))


BURN_IN = 150  # steps of SGD before constant SGD samples
# Each with its default hyperparameters, and with rates that suit this task.
METHODS: dict[str, Callable[[Task], Any]] = {
    "sgperm": lambda task: optperm.sgperm(num_steps=task.steps, key=task.seed),
    "laperm": lambda task: optperm.laperm(optax.adam(1e-3), every=58),
    "sgd": lambda task: optax.sgd(0.1, 0.9),
    "adam": lambda task: optax.adam(1e-3),
    "muon": lambda task: optax.contrib.muon(0.02),
    "svrg": lambda task: optax.chain(optperm.svrg(), optax.sgd(0.1, 0.0)),
    "agn": lambda task: optperm.agn(optax.sgd(0.5, 0.5), every=10),
    "diloco": lambda task: optperm.diloco(
        optax.adamw(3e-3), optax.sgd(0.8, 0.5, nesterov=True), every=20
    ),
    "dldr": lambda task: optperm.dldr(
        optax.sgd(0.1, 0.0),
        optperm.dim_reduce(n_components=10, alpha=0.01, max_search_steps=10),
        every=5,
        num_snapshots=16,
    ),
    "low-rank": lambda task: by_rate(
        optperm.low_rank(optax.scale_by_adam(), rank=0.25, residual="scaled", key=task.seed), 3e-3
    ),
    "apollo": lambda task: by_rate(optperm.apollo(rank=0.25, key=task.seed), 3e-3),
    "constant-sgd": lambda task: optperm.switch_after(
        BURN_IN,
        optax.sgd(0.1, 0.9),
        optperm.mandt_sgd(task.num_data, task.batch_size, max_step=0.3),
        track=True,
    ),
}
# The number of gradients of batches in some steps, of methods that take more than one in a step.
GRADIENTS = {"svrg": lambda n: 2 * n, "constant-sgd": lambda n: 2 * n - min(n, BURN_IN)}
INIT = 0x494E_4954  # far from the step counts that a method may fold into the same key
SNAPSHOTS = 2  # epochs from one snapshot of SVRG to the next


class Network(nn.Module):
    """An MLP with a hidden layer, whose biases are drawn like its kernels."""

    hidden: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Map (batch, 8, 8) to logits."""
        x = x.reshape(len(x), -1)
        for index, units in enumerate((self.hidden, CLASSES)):
            bound = math.sqrt(6 / x.shape[-1])
            ends = {"minval": -bound, "maxval": bound}
            draw_bias = functools.partial(jax.random.uniform, **ends)
            init = {"kernel_init": nn.initializers.he_uniform(), "bias_init": draw_bias}
            x = nn.Dense(units, **init)(x)
            x = x if index else nn.relu(x)
        return x


def train_by(name: str, seed: int, chosen: argparse.Namespace) -> dict[str, Any]:
    """Train by a method, and return the figures of the run."""
    (x, y), (x_test, y_test) = images.standardized_digits()
    epochs, model = chosen.epochs or 20, Network(chosen.units)
    per_epoch = len(x) // chosen.batch_size
    task = Task(epochs * per_epoch, seed, len(x), chosen.batch_size)
    key, tx = jax.random.fold_in(jax.random.key(seed), INIT), METHODS[name](task)
    params = jax.jit(model.init)(key, x[:1])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = model.apply(params, batch["x"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        prior = optperm.bayes.normal_prior(params, 1.0, len(x)) if name == "constant-sgd" else 0.0
        return losses.mean() + prior

    def snapshot(epoch: int) -> Any:
        return optperm.variance.take_snapshot if (epoch - 1) % SNAPSHOTS == 0 else None

    state = TrainState.create(
        apply_fn=None, params=params, tx=tx, opt_state=jax.jit(tx.init)(params)
    )
    result: Any = fit(
        jax.device_put(state, jax.devices()[0]),  # one device by choice
        loss_fn,
        {"x": x, "y": y},
        epochs=epochs,
        batch_size=chosen.batch_size,
        key=seed,
        callbacks={"epoch_start": snapshot} if name == "svrg" else None,
    )
    rows, trained = result.history.epochs, result.state
    if name in ("sgperm", "laperm"):
        trained = trained.replace(
            params=optperm.permutation.permuted_params(trained.opt_state, trained.params)
        )
    right = model.apply(trained.params, x_test).argmax(axis=1) == y_test
    full = len(x) * -(-epochs // SNAPSHOTS) if name == "svrg" else 0
    return {
        "seconds_per_step": statistics.median(rows["seconds"]) / per_epoch,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(trained.opt_state)),
        "gradients": GRADIENTS.get(name, int)(result.step) * chosen.batch_size + full,
        "losses": rows["loss"],
        "accuracy": float(right.mean()),
    }


def compare_methods(chosen: argparse.Namespace) -> None:
    """Train by all methods from all seeds; show and draw what came of it."""
    groups = dict[str, list[dict[str, Any]]]()
    for name in chosen.methods:
        runs = [train_by(name, seed, chosen) for seed in range(chosen.seeds)]
        groups[name] = runs
        ends = [run["accuracy"] for run in runs]
        spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
        RESULTS.show(
            "All methods with their default hyperparameters",
            method=name,
            test_accuracy=f"{statistics.mean(ends):.4f}{spread}",
            ms_per_step=f"{1e3 * statistics.median(run['seconds_per_step'] for run in runs):.3f}",
            optimizer_state=f"{runs[0]['state_bytes'] / 1024:,.1f} KiB",
            gradients=f"{runs[0]['gradients']:,}",
        )
    if chosen.picture is not None:
        draw(chosen.picture, groups)


def draw(path: pathlib.Path, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    """Draw the training loss over the epochs, and the final test accuracies."""
    with picture(path, figsize=(6, 2.6 + 0.16 * len(groups))) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        for row, runs in enumerate(groups.values()):
            style = {"color": f"C{row % 7}", "marker": "os^D"[row // 7 % 4]}
            left.plot(np.mean([run["losses"] for run in runs], axis=0), **style)
            right.plot([run["accuracy"] for run in runs], [row] * len(runs), "", **style)
        left.set(xlabel="epoch", ylabel="training loss", yscale="log", title="mean of the seeds")
        right.set(xlabel="test accuracy", title="each seed")
        right.set_yticks(range(len(groups)), list(groups))


PARTS = ("cost", "kills", "methods")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", default=PARTS)
    add("--repetitions", type=int, default=11, help="for cost")
    add("--seconds", type=float, default=3.0, help="of each run, at least, for cost")
    add("--hidden", type=int, nargs="+", default=[64, 256], help="for cost")
    add("--kills", type=int, default=40)
    add("--devices", type=int, default=1, help="for kills")
    add("--life", type=float, default=6.0, help="seconds that each lasts at most, for kills")
    add("--epochs", type=int, help="40 of 50 steps for kills, 20 for methods")
    add("--methods", nargs="+", choices=METHODS, default=[*METHODS])
    add("--seeds", type=int, default=3, help="for methods")
    add("--units", type=int, default=256, help="of the hidden layer, for methods")
    add("--batch-size", type=int, default=50, help="for methods")
    add("--picture", type=pathlib.Path, help="a file for the picture of methods")
    add("--train", type=pathlib.Path, help=argparse.SUPPRESS)
    add("--pause", type=float, default=0.0, help=argparse.SUPPRESS)
    results.add_argument(parser)
    chosen = parser.parse_args()
    if "kills" in chosen.only or chosen.train is not None:
        jax.config.update("jax_num_cpu_devices", chosen.devices)
    if chosen.train is not None:
        train_on(chosen.train, chosen.devices, chosen.epochs, chosen.pause)
        return
    if "cost" in chosen.only:
        compare_costs(chosen.hidden, chosen.repetitions, chosen.seconds)
    if "kills" in chosen.only:
        compare_killed(chosen)
    if "methods" in chosen.only:
        compare_methods(chosen)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
