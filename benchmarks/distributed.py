"""Cost and gain of AGN and DiLoCo.

- local: the processor time of a whole local step (update and applied updates, with donated params and
  state), with `commit=False` or counted, over the optimizer alone; beside it AGN's local step written by
  hand: the optimizer with one float32 accumulator in its state, without and with a center that passes
  through unchanged;
- periods: ten steps in a scan, the last with a commit, over ten steps of the optimizer alone;
- stacked: local steps of four replicas on four virtual devices, with `jax.shard_map` of `jax.vmap`;
- traffic: what a device sends, read from the compiled programs, over synchronous SGD;
- commits: the time of a step with a commit and of one without, in one program of period 2;
- outer: the held-out loss of outer optimizers with few and with many commits, on an MLP and on a small
  decoder, by `jax.vmap` in one process. `alone` is one replica with its own batch size, and so for the
  same time; `in step` averages the gradients of every step. Rates are the best of a grid on other
  held-out data, for each method or for one replica alone. A method loses to it if the mean
  difference of their losses, seed by seed, is above its standard error;
- bytes: the loss of a byte transformer by the bytes that a device sends. Four replicas start together
  after some steps in step, and take as many tokens each: in step, alone, with AGN, and with DiLoCo
  (whole, streamed and compressed), each at the best point of a grid. With nanoGPT's text, `--layers 4
  --width 128 --batch 3 --steps 2000 --common 0` is nanoGPT's small model for a CPU.

    python benchmarks/distributed.py [--only PART ...] [--data FILE] [--json FILE]
"""

import argparse
import functools
import itertools
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results
from collectives import find_collectives, traffic
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from library_bytes import windows
from timing import stepping, take_turns

import optperm
from optperm.distributed import Compression, Every, center_params

AXIS, REPLICAS, PERIOD, NEVER = "replica", 4, 10, 1_000_000
SGD = optax.sgd(0.1)
OPTIMIZERS = {
    "SGD": SGD,
    "momentum": optax.sgd(0.1, momentum=0.9),
    "Adam": optax.adam(1e-3),
    "AdamW": optax.adamw(1e-3),
}
COMMITTING = ("SGD", "Adam")
RULES = ("mean", "sum", "sequential")
RESULTS = results.Results()


# What a step costs.
def random_tree(leaves: int, size: int, seed: int) -> dict[str, jax.Array]:
    """Return float32 leaves of one size."""
    keys = jax.random.split(jax.random.key(seed), leaves)
    return {f"leaf{i:03d}": jax.random.normal(key, (size,)) for i, key in enumerate(keys)}


def by_hand(tx: optax.GradientTransformation, *, has_center: bool = False) -> Any:
    """Return the optimizer with the sum of all gradients in its state, and what a commit would need."""

    def init(params: Any) -> Any:
        center = (params, tx.init(params)) if has_center else ()
        return optax.tree.zeros_like(params), tx.init(params), center

    def update(grads: Any, state: Any, params: Any) -> Any:
        total, inner, center = state
        updates, inner = tx.update(grads, inner, params)
        return updates, (optax.tree.add(total, grads), inner, center)

    return optax.GradientTransformation(init, update)


def make_step(tx: Any, **extra_args: Any) -> Callable[..., Any]:
    """Return a whole step: update and applied updates."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra_args)
        return optperm.apply_updates(params, updates, state), state

    return step


def make_period(tx: Any, **ends: Any) -> Callable[..., Any]:
    """Return ten steps in one scan, the last of which commits."""
    local = make_step(tx, **({"commit": False} if ends else {}))

    def run(params: Any, state: Any, grads: Any) -> Any:
        def body(carried: Any, _: None) -> Any:
            return local(*carried, grads), None

        carried, _ = jax.lax.scan(body, (params, state), length=PERIOD - 1)
        return make_step(tx, **ends)(*carried, grads)

    return run


def compare(
    title: str, name: str, peers: dict[str, Any], leaves: int, size: int, repetitions: int
) -> None:
    """Show the processor time of each peer (a step and its optimizer), divided by the optimizer's alone.

    Leaves are those of one replica on each of four devices if the title says so.
    """
    params, grads = random_tree(leaves, size, 0), random_tree(leaves, size, 1)
    is_mapped = "replicas" in title
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))

    def place(tree: Any) -> Any:
        if not is_mapped:
            return jax.tree.map(jnp.copy, tree)
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), tree)
        return jax.device_put(rows, NamedSharding(mesh, P(AXIS)))

    def spread(step: Callable[..., Any]) -> Callable[..., Any]:
        if not is_mapped:
            return step
        return jax.shard_map(jax.vmap(step), mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))

    grads, calls = place(grads), {}
    for peer, (tx, step) in peers.items():
        held = place(params), place(tx.init(params))
        calls[peer] = stepping(jax.jit(spread(step), donate_argnums=(0, 1)), held, grads)
    times = take_turns(calls, repetitions, time.process_time)
    median = {peer: statistics.median(taken) for peer, taken in times.items()}
    found = {peer: f"{median[peer] / median['bare']:.2f}" for peer in peers if peer != "bare"}
    RESULTS.show(title, optimizer=name, **found)
    print(f"    {1e3 * median['bare']:.2f} ms by the bare optimizer")


def compare_steps(parts: list[str], leaves: int, size: int, repetitions: int) -> None:
    """Show the costs of local steps, of periods and of replicas in one program, for each optimizer."""
    few = max(1, leaves // REPLICAS)  # four replicas share this machine
    for name, bare in OPTIMIZERS.items():
        plain = {"bare": (bare, make_step(bare)), "by hand": (tx := by_hand(bare), make_step(tx))}
        centered = by_hand(bare, has_center=True)
        for mapped in (False, True):
            axis = {"axis_name": AXIS} if mapped else {}
            ours = {
                "agn": optperm.agn(bare, every=NEVER, **axis),
                "diloco": optperm.diloco(bare, every=NEVER, **axis),
            }
            local = {peer: (tx, make_step(tx, commit=False)) for peer, tx in ours.items()}
            if mapped and "stacked" in parts:
                peers = plain | {"by hand": (centered, make_step(centered))} | local
                title = f"Local steps of {REPLICAS} replicas in one program"
                compare(title, name, peers, few, size, repetitions)
            if not mapped and "local" in parts:
                counted = {f"{peer} counted": (tx, make_step(tx)) for peer, tx in ours.items()}
                peers = plain | {"by hand with a center": (centered, make_step(centered))}
                title = "Local steps, as multiples of the bare optimizer's"
                compare(title, name, peers | local | counted, leaves, size, repetitions)
            if not mapped and "periods" in parts:
                peers = {"bare": (bare, make_period(bare))}
                peers |= {peer: (tx, make_period(tx, commit=True)) for peer, tx in ours.items()}
                title = f"{PERIOD} steps in a scan, one with a commit"
                compare(title, name, peers, leaves, size, max(3, repetitions // 3))


def on_replicas(tx: optax.GradientTransformation, *, synchronous: bool = False) -> Any:
    """Return a whole step on all replicas; params and state are donated."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        if synchronous:
            grads = jax.lax.pmean(grads, AXIS)
        return make_step(tx)(params, state, grads)

    devices = jax.devices("cpu")[:REPLICAS]
    return jax.pmap(step, axis_name=AXIS, devices=devices, donate_argnums=(0, 1))


def replicated(tree: Any) -> Any:
    """Return one copy for each replica, along a leading axis."""
    place = jax.pmap(lambda x: x, devices=jax.devices("cpu")[:REPLICAS])
    return jax.tree.map(lambda x: place(jnp.broadcast_to(x, (REPLICAS, *x.shape))), tree)


def committing(optimizer: optax.GradientTransformation, period: int) -> dict[str, Any]:
    """Return AGN by each rule, and DiLoCo."""
    how = {"every": period, "axis_name": AXIS}
    rules = {f"agn {rule}": optperm.agn(optimizer, combine=rule, **how) for rule in RULES}
    return rules | {"diloco": optperm.diloco(optimizer, **how)}


def show_traffic() -> None:
    """Show what the compiled steps send."""
    shapes = {"w0": (784, 128), "b0": (128,), "w1": (128, 10), "b1": (10,)}
    params = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    peers = {"synchronous": SGD} | committing(SGD, PERIOD)
    exchanges: dict[str, dict[str, Any]] = {
        "4 fragments": {"every": Every(PERIOD, fragments=4)},
        "4 bits": {"every": PERIOD, "compress": Compression(bits=4)},
        "top 3 %, 2 bits": {"every": PERIOD, "compress": Compression(1 / 32, bits=2)},
    }
    for peer, options in exchanges.items():
        peers[peer] = optperm.diloco(SGD, axis_name=AXIS, **options)
    synchronous = 0.0
    for name, tx in peers.items():
        step, stacked = on_replicas(tx, synchronous=name == "synchronous"), replicated(params)
        hlo = step.lower(stacked, replicated(tx.init(params)), stacked).compile().as_text()
        _, size = traffic(hlo, PERIOD)
        synchronous = synchronous or size
        ratio = f"{size / synchronous:.6f}"
        RESULTS.show("Traffic", method=name, bytes_per_step=f"{size:,.1f}", of_synchronous=ratio)
        for each in find_collectives(hlo):
            print(f"    {each}")


def compare_commits(leaves: int, size: int, repetitions: int) -> None:
    """Show the times of steps with and without a commit."""
    for name in COMMITTING:
        params, grads = random_tree(leaves, size, 0), replicated(random_tree(leaves, size, 1))
        calls = {}
        for peer, tx in committing(OPTIMIZERS[name], 2).items():
            # Of a period of two steps the first is local.
            carry = replicated(params), replicated(tx.init(params))
            call = stepping(on_replicas(tx), carry, grads)
            calls |= {f"{peer}, local": call, f"{peer}, commit": call}
        times = take_turns(calls, repetitions)
        of = {each: f"{1e3 * statistics.median(taken):.2f}" for each, taken in times.items()}
        for peer in committing(SGD, 2):
            cells = {"local_ms": of[f"{peer}, local"], "commit_ms": of[f"{peer}, commit"]}
            RESULTS.show("Commits", optimizer=name, method=peer, **cells)


# Outer optimizers.
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
      initial: A function from a seed to params.
      loss_fn: The mean loss of params for a batch.
      batch_of: A function from the data to train on, a key and a size to a batch.
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

    def batch_of(data: images.Data, key: jax.Array, size: int) -> images.Data:
        rows = jax.random.randint(key, (size,), 0, len(data[0]))
        return data[0][rows], data[1][rows]

    def initial(seed: Any) -> images.Params:
        return images.initial(seed, x.shape[1:], hidden=(64,))

    data = (x[:kept], y[:kept]), (x[kept:], y[kept:]), test
    return Model(initial, images.loss_fn, batch_of, 16, data)


def of_bytes() -> Model:
    """Return a decoder of `library_bytes`."""
    whole, held = library_bytes.load()
    choice, test = (jnp.asarray(windows(held, np.random.default_rng(i), 256)) for i in (2, 1))
    width = library_bytes.CONTEXT + 1

    def batch_of(data: jax.Array, key: jax.Array, size: int) -> jax.Array:
        starts = jax.random.randint(key, (size, 1), 0, len(data) - width)
        return data[starts + jnp.arange(width)].astype(jnp.int32)

    data = jnp.asarray(whole), choice, test
    return Model(library_bytes.initial, library_bytes.loss_fn, batch_of, 2, data)


def make_trainer(model: Model, baseline: str | None, steps: int) -> Callable[..., Any]:
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
            return make_step(tx)(params, state, grads), None

        def on_replica(keys: jax.Array) -> Any:
            return jax.lax.scan(step, (start, tx.init(start)), keys)[0][0]

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), (count, steps))
        ends = jax.vmap(on_replica, axis_name=AXIS)(keys)
        # The last step commits, so all replicas are equal.
        params = jax.tree.map(lambda leaf: leaf[0], ends)
        return model.loss_fn(params, data[1]), model.loss_fn(params, data[2])

    return functools.cache(lambda *numbers: tuple(map(float, losses(model.data, *numbers))))


def compare_outer(data: pathlib.Path | None, seeds: int, json: pathlib.Path | None) -> None:
    """Show a row of both tables for each setting."""
    models = {"MLP": of_images(data), "decoder": of_bytes()}
    make = functools.cache(lambda name, *how: make_trainer(models[name], *how))
    for name, steps, every in SETTINGS:
        setting = {"model": name, "steps": steps, "commits": steps // every}
        if RESULTS.has(TITLES["alone"], **{key: str(value) for key, value in setting.items()}):
            continue
        tests: dict[str, dict[str, np.ndarray]] = {"own": {}, "alone": {}}
        rates = dict[str, float]()
        for method in (*BASELINES, *OUTER):
            train = make(name, method if method in BASELINES else None, steps)
            how = () if method in BASELINES else (OUTER[method], every)
            by_rate = {rate: train(*how, rate, seeds)[0] for rate in RATES}
            rates[method] = min(by_rate, key=lambda rate: np.nan_to_num(by_rate[rate], nan=np.inf))
            for kind, rate in (("own", rates[method]), ("alone", rates["alone"])):
                found = [train(*how, rate, seed)[1] for seed in range(seeds)]
                tests[kind][method] = np.array(found)
            print(f"{setting} {method}, grid {images.shown(by_rate)}", flush=True)
        for kind, title in TITLES.items():
            cells, losing = {}, []
            for method, found in tests[kind].items():
                excess = found - tests[kind]["alone"]
                # A loss that is not finite loses too.
                if method != "alone" and not excess.mean() <= standard_error(excess):
                    losing.append(method)
                cells[method] = f"{found.mean():.3f} ± {standard_error(found):.3f}"
                cells[method] += f" ({rates[method]:g})" * (kind == "own")
            RESULTS.show(title, **setting, **cells, lose_to_alone="; ".join(losing) or "none")
        RESULTS.write(json)


def standard_error(found: np.ndarray) -> float:
    """Return the standard error of the mean; 0 of one seed."""
    return float(np.std(found, ddof=1) / np.sqrt(len(found))) if len(found) > 1 else 0.0


# Loss by bytes.
INNER = 1.5e-3, 3e-3, 6e-3, 1.2e-2
MUON = 5e-3, 1.5e-2, 4.5e-2
CENTERS = {
    "SGD 1": optax.sgd(1.0),
    "Nesterov 0.8, 0.5": None,  # what diloco takes by default
    "Nesterov 0.9, 0.8": optax.sgd(0.9, momentum=0.8, nesterov=True),
    "Nesterov 0.7, 0.9": optax.sgd(0.7, momentum=0.9, nesterov=True),
}


class Method(NamedTuple):
    """A way to train, what it was tried with, and the best of that.

    Attributes:
      make: A function from a point of the grid to what trains.
      grid: The points: the rate of the replicas, and of a center its rate or optimizer.
      best: The point with the lowest loss, after 400 steps from 200 common ones.
      plan: When fragments are exchanged, if they are.
    """

    make: Callable[..., Any]
    grid: list[tuple[Any, ...]]
    best: tuple[Any, ...]
    plan: Every | None = None


def adamw(rate: float, steps: int) -> optax.GradientTransformation:
    """Return AdamW with a cosine over some steps, or with a constant rate for 0 of them."""
    rates = optax.cosine_decay_schedule(rate, steps, 0.05) if steps else rate
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates, weight_decay=0.01))


def muon(rate: float, steps: int) -> optax.GradientTransformation:
    """Return Muon with a cosine over some steps, and Adam for all that is no matrix."""
    fall = optax.cosine_decay_schedule(1.0, steps, 0.05)
    return optax.contrib.muon(lambda t: rate * fall(t), adam_learning_rate=lambda t: 3e-3 * fall(t))


def make_methods(steps: int) -> dict[str, Method]:
    """Return the compared methods, each with its settings for a number of steps."""
    whole, parts = Every(PERIOD), Every(PERIOD, fragments=4, delay=1)

    def agn(rate: float, center_rate: float) -> Any:
        center = adamw(center_rate, steps)
        return optperm.agn(adamw(rate, steps), center, every=PERIOD, axis_name=AXIS)

    def diloco(
        rate: float, outer: str, inner: Any = adamw, plan: Every = whole, **options: Any
    ) -> Any:
        given = inner(rate, steps), CENTERS[outer]
        return optperm.diloco(*given, every=plan, axis_name=AXIS, **options)

    def of_diloco(best: tuple[float, str], rates: Any = INNER, **options: Any) -> Method:
        make, grid = functools.partial(diloco, **options), list(itertools.product(rates, CENTERS))
        return Method(make, grid, best, options.get("plan", whole))

    def of_one(make: Any, best: float, rates: Any) -> Method:
        return Method(lambda rate: make(rate, steps), [(rate,) for rate in rates], (best,))

    centers, default = list(itertools.product(INNER, (1e-2, 3e-2))), "Nesterov 0.8, 0.5"
    streamed = {"plan": parts, "mixing": 0.5}
    return {
        "in step": of_one(adamw, 6e-3, INNER),
        "alone": of_one(adamw, 3e-3, INNER),
        "`agn`": Method(agn, centers, (3e-3, 1e-2), whole),
        "`diloco`": of_diloco((6e-3, default)),
        "`diloco`, 4 fragments, delay 1, mixing 0.5": of_diloco(
            (3e-3, "Nesterov 0.7, 0.9"), **streamed
        ),
        "`diloco`, 4 bits": of_diloco((6e-3, default), compress=Compression(bits=4)),
        "`diloco`, top 1/16 at 2 bits": of_diloco(
            (6e-3, default), compress=Compression(1 / 16, bits=2)
        ),
        "Muon in step": of_one(muon, 1.5e-2, MUON),
        "MuLoCo: `diloco` of Muon": of_diloco((1.5e-2, default), MUON, inner=muon),
    }


def train_bytes(name: str, tx: Any, plan: Every | None, params: Any, batches: Any) -> Any:
    """Return what the replicas have trained, and the bytes that each step has sent."""
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P(AXIS))

    def step(params: Any, opt_state: Any, ids: jax.Array, commit: Any) -> tuple[Any, Any]:
        grads = jax.grad(library_bytes.loss_fn)(params, ids)
        grads = jax.lax.pmean(grads, AXIS) if "in step" in name else grads
        return make_step(tx, **({} if plan is None else {"commit": commit}))(
            params, opt_state, grads
        )

    programs, sent = dict[Any, tuple[Any, int]](), list[int]()
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * REPLICAS), params)
    carry = jax.device_put((stacked, jax.vmap(tx.init)(stacked)), where)
    for number, rows in enumerate(batches, start=1):
        ids, exchange = jax.device_put(rows, where), plan and plan.at(number)
        commit = bool(exchange.send) if exchange and "agn" in name else exchange
        if commit not in programs:
            block = jax.vmap(functools.partial(step, commit=commit))
            mapped = jax.shard_map(block, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
            compiled = jax.jit(mapped, donate_argnums=(0, 1)).lower(*carry, ids).compile()
            programs[commit] = compiled, sum(c.bytes for c in find_collectives(compiled.as_text()))
        program, size = programs[commit]
        carry = jax.block_until_ready(program(*carry, ids))
        sent.append(size)
    trained = carry[0] if plan is None else center_params(carry[1])
    return jax.device_get(jax.tree.map(lambda leaf: leaf[0], trained)), sent


def compare_bytes(chosen: argparse.Namespace) -> None:
    """Show nats per byte on held-out bytes, and the bytes that a step sends, on average and at most."""
    (data, held), evaluate = library_bytes.load(chosen.data), jax.jit(library_bytes.loss_fn)
    test = windows(held, np.random.default_rng(2 if chosen.grid else 1), 256)

    def batches(count: int, seed: int, stream: int) -> Any:
        rng = np.random.default_rng((seed, stream))
        return (windows(data, rng, REPLICAS, chosen.batch) for _ in range(count))

    starts = [
        train_bytes("in step", adamw(3e-3, 0), None, library_bytes.initial(seed), common)[0]
        for seed in range(chosen.seeds)
        for common in [batches(chosen.common, seed, 0)]
    ]
    for name, method in make_methods(chosen.steps).items():
        if chosen.methods and name.replace("`", "") not in chosen.methods:
            continue
        best = method.best if chosen.rate is None else (chosen.rate, *method.best[1:])
        for point in method.grid if chosen.grid else [best]:
            losses, sent = [], [0]
            for seed, start in enumerate(starts):
                given = method.make(*point), method.plan, start, batches(chosen.steps, seed, 1)
                trained, sent = train_bytes(name, *given)
                losses.append(float(evaluate(trained, test)))
            deviation = f" ± {np.std(losses):.3f}" if len(losses) > 1 else ""
            RESULTS.show(
                "Held-out loss and traffic of a byte transformer",
                method=name,
                **{"rate of the replicas, and of the center": ", ".join(map(str, point))},
                nats_per_byte=f"{np.mean(losses):.3f}{deviation}",
                bytes_per_step=f"{sum(sent) / len(sent):,.0f}",
                most_in_one=f"{max(sent):,}",
            )
            RESULTS.write(chosen.json)


PARTS = ("local", "periods", "stacked", "traffic", "commits", "outer", "bytes")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", default=PARTS)
    add("--repetitions", type=int, default=31)
    add("--leaves", type=int, default=100)
    add("--leaf-size", type=int, default=100_000)
    add("--data", type=pathlib.Path, help="an npz of images for outer, or a text for bytes")
    add("--seeds", type=int, default=3, help="runs to average")
    add("--layers", type=int, help="layers of the decoder; 1 for outer, 3 for bytes")
    add("--width", type=int, help="its width, a multiple of 4; 48 for outer, 96 for bytes")
    add("--steps", type=int, default=400, help="steps of each method, for bytes")
    add("--common", type=int, default=200, help="synchronous steps before them")
    add("--batch", type=int, default=8, help="contexts in a step of each replica")
    add("--rate", type=float, help="of the replicas, instead of the best")
    add("--methods", nargs="+", help="for bytes; without, all")
    add("--grid", action="store_true", help="all points of the grid, for bytes")
    add("--resume", action="store_true", help="keep the rows in the file of --json")
    results.add_argument(parser)
    chosen = parser.parse_args()
    if chosen.resume:
        RESULTS.resume(chosen.json)
    # With too few devices, the processor simulates four. JAX reads this when it starts.
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    compare_steps(chosen.only, chosen.leaves, chosen.leaf_size, chosen.repetitions)
    if "traffic" in chosen.only:
        show_traffic()
    if "commits" in chosen.only:
        few = max(1, chosen.leaves // REPLICAS)
        compare_commits(few, chosen.leaf_size, chosen.repetitions)
    if "outer" in chosen.only:
        library_bytes.LAYERS, library_bytes.WIDTH = chosen.layers or 1, chosen.width or 48
        compare_outer(chosen.data, chosen.seeds, chosen.json)
    if "bytes" in chosen.only:
        library_bytes.LAYERS, library_bytes.WIDTH = chosen.layers or 3, chosen.width or 96
        compare_bytes(chosen)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
