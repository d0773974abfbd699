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
- frontier: the held-out loss of a byte decoder by the bytes that a replica sends: how often replicas
  exchange their moves, in how many bits an entry, with averaging and with Nesterov momentum, beside
  training in step and one replica alone. Each loss is at its best rate, found on other held-out bytes
  with the first seed: a rate is halved and doubled until both are worse. `bytes` is what
  a replica passes to collectives, and `on a link` what each link of a ring carries, both over training
  in step. All replicas are in one process, by `jax.vmap`.

    python benchmarks/distributed.py [--only PART ...] [--data FILE] [--json FILE]
"""

import argparse
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import images
import jax
import jax.numpy as jnp
import library_bytes
import numpy as np
import optax
import results
import timing
from collectives import find_collectives, traffic
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from library_bytes import windows
from timing import stepping, take_turns

import optperm
from optperm.distributed import Compression, Every, _compression, center_params

AXIS, REPLICAS, PERIOD, NEVER = "replica", 4, 10, 1_000_000
SGD, NESTEROV = optax.sgd(0.1), optax.sgd(0.8, momentum=0.5, nesterov=True)
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
                "diloco": optperm.diloco(bare, NESTEROV, every=NEVER, **axis),
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
    return rules | {"diloco": optperm.diloco(optimizer, NESTEROV, **how)}


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


def of_bytes(text: pathlib.Path | None = None) -> Model:
    """Return a decoder of `library_bytes`, of a text or of Python's library."""
    whole, held = library_bytes.load(text)
    choice, test = (jnp.asarray(windows(held, np.random.default_rng(i), 256)) for i in (2, 1))
    width = library_bytes.CONTEXT + 1

    def batch_of(data: jax.Array, key: jax.Array, size: int) -> jax.Array:
        starts = jax.random.randint(key, (size, 1), 0, len(data) - width)
        return data[starts + jnp.arange(width)].astype(jnp.int32)

    data = jnp.asarray(whole), choice, test
    return Model(library_bytes.initial, library_bytes.loss_fn, batch_of, 2, data)


def make_trainer(
    model: Model,
    steps: int,
    make_inner: Callable[..., Any],
    make: Callable[..., Any] | None = None,
    replicas: int = 1,
    size: int = 0,
) -> Callable[..., Any]:
    """Return a function of a method's numbers, a rate and a seed, to what its replicas have learned.

    Args:
      model: What is trained.
      steps: The number of steps.
      make_inner: A function from a rate, steps and params to the optimizer of a replica.
      make: A function from this optimizer and the method's numbers to the method. One program is for
        all numbers, since compiling takes longer than training.
      replicas: How many there are.
      size: The size of a replica's batch.

    Returns:
      A function to the loss to choose by, and the loss to test.
    """

    @jax.jit
    def losses(data: Any, *numbers: Any) -> tuple[jax.Array, jax.Array]:
        *how, rate, seed = numbers
        start = model.initial(seed)
        tx = make_inner(rate, steps, start)
        tx = tx if make is None else make(tx, *how)

        def step(carried: Any, key: jax.Array) -> Any:
            params, state = carried
            grads = jax.grad(model.loss_fn)(params, model.batch_of(data[0], key, size))
            return make_step(tx)(params, state, grads), None

        def on_replica(keys: jax.Array) -> Any:
            return jax.lax.scan(step, (start, tx.init(start)), keys)[0]

        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1), (replicas, steps))
        params, state = jax.vmap(on_replica, axis_name=AXIS)(keys)
        # The center is the same on all replicas.
        trained = params if make is None else center_params(state)
        trained = jax.tree.map(lambda leaf: leaf[0], trained)
        return model.loss_fn(trained, data[1]), model.loss_fn(trained, data[2])

    return functools.cache(lambda *numbers: tuple(map(float, losses(model.data, *numbers))))


def adamw(rate: Any, steps: int, params: Any) -> optax.GradientTransformation:
    """Return AdamW with a cosine over some steps."""
    del params
    fall = optax.cosine_decay_schedule(1.0, steps, 0.05)
    return optax.adamw(lambda t: rate * fall(t))


def by_diloco(every: Any = None, **options: Any) -> Callable[..., Any]:
    """Return what makes DiLoCo of an inner optimizer and numbers: a period, unless it is given."""

    def make(inner: Any, outer_rate: Any, momentum: Any, *period: Any) -> Any:
        outer = optax.sgd(outer_rate, momentum=momentum, nesterov=True)
        plan = (lambda commits: period[0]) if every is None else every
        return optperm.diloco(inner, outer, every=plan, axis_name=AXIS, **options)

    return make


def compare_outer(data: pathlib.Path | None, seeds: int, json: pathlib.Path | None) -> None:
    """Show a row of both tables for each setting."""
    models = {"MLP": of_images(data), "decoder": of_bytes()}

    @functools.cache
    def make(name: str, baseline: str | None, steps: int) -> Callable[..., Any]:
        model = models[name]
        if baseline is None:
            return make_trainer(model, steps, adamw, by_diloco(), REPLICAS, model.batch)
        return make_trainer(model, steps, adamw, size=model.batch * BASELINES[baseline])

    for name, steps, every in SETTINGS:
        setting = {"model": name, "steps": steps, "commits": steps // every}
        if RESULTS.has(TITLES["alone"], **{key: str(value) for key, value in setting.items()}):
            continue
        tests: dict[str, dict[str, np.ndarray]] = {"own": {}, "alone": {}}
        rates = dict[str, float]()
        for method in (*BASELINES, *OUTER):
            train = make(name, method if method in BASELINES else None, steps)
            how = () if method in BASELINES else (*OUTER[method], every)
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
CODES = {
    "32 bits": None,
    "1 bit": Compression(bits=1),
    "4 bits": Compression(bits=4),
    "1/32 at 2 bits": Compression(1 / 32, bits=2, decay=1.0),
    "2 bits": Compression(bits=2),
}
PERIODS = (1, 3, 10, 50)
CENTERS = {"nats": OUTER["averaging"], "nats, Nesterov 0.8, 0.5": OUTER["0.8, 0.5"]}
# The exchanges with `--few`.
FEW = ((1, "32 bits"), (1, "1 bit"), (3, "1 bit"), (10, "32 bits"), (10, "1 bit"), (50, "32 bits"))


def adam(rate: Any, steps: int, params: Any) -> optax.GradientTransformation:
    """Return Adam with a short warm-up and a cosine."""
    del params
    fall = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps, 0.02)
    return optax.adam(lambda t: rate * fall(t))


def muon(rate: Any, steps: int, params: Any) -> optax.GradientTransformation:
    """Return Muon with the same schedule, and Adam for all but kernels."""
    fall = optax.warmup_cosine_decay_schedule(0.0, 1.0, steps // 20, steps, 0.02)
    axes = optperm.memory.muon_axes(params)
    rates = {
        "learning_rate": lambda t: rate * fall(t),
        "adam_learning_rate": lambda t: 6e-3 * fall(t),
    }
    return optax.contrib.muon(**rates, muon_weight_dimension_numbers=axes)


# An inner optimizer, and the rate from which the best is found.
INNER = {"Adam": (adam, 6e-3), "Muon": (muon, 1.5e-2)}


def find_rate(loss_of: Callable[[float], float], rate: float) -> tuple[float, dict[float, float]]:
    """Return the best rate, whose half and double are worse, and the loss of each that was tried."""
    tried = dict[float, float]()
    while True:
        for each in (rate / 2, rate, 2 * rate):
            if each not in tried:
                tried[each] = float(np.nan_to_num(loss_of(each), nan=np.inf))
        best = min(tried, key=lambda each: tried[each])
        if best == rate:
            return best, dict(sorted(tried.items()))
        rate = best


def show_losses(
    title: str, exchange: str, trainers: dict[str, Any], sent: Any, chosen: argparse.Namespace
) -> None:
    """Show a row: the loss of each outer optimizer at its best rate, and the shortest time of a step."""
    cells, grids, times = dict[str, str](), list[str](), list[float]()
    for outer, train in trainers.items():

        @functools.cache
        def run(rate: float, seed: int, train: Any = train) -> Any:
            with timing.undisturbed():
                start = time.process_time()
                found = train(rate, seed)
                times.append((time.process_time() - start) / chosen.steps)
            return found

        best, grid = find_rate(lambda rate, run=run: run(rate, 0)[0], INNER[chosen.inner][1])
        losses = np.array([run(best, seed)[1] for seed in range(chosen.seeds)])
        cells[outer] = f"{losses.mean():.3f} ± {standard_error(losses):.3f}"
        seeds = ", ".join(f"{loss:.4f}" for loss in losses)
        grids.append(f"{outer}, rate {best:g} of {images.shown(grid)}; seeds {seeds}")
    bytes_sent, on_link = sent
    cells = {"bytes": f"{bytes_sent:.4f}", "on a link": f"{on_link:.4f}"} | cells
    cells["processor ms per step"] = f"{1e3 * min(times):.1f}"
    RESULTS.show(title, exchange=exchange, **cells, grid="; ".join(grids))
    RESULTS.write(chosen.json)


def find_sent(tx: Any, params: Any, every: int, replicas: int) -> tuple[float, float]:
    """Return the bytes per step of a replica, and on a link of a ring, over training in step."""
    link = {"axis_name": AXIS, "bandwidth": 1e9, "replicas": replicas}
    report = optperm.distributed.traffic_report(tx, params, every=every, **link)
    ours, whole = report.all, report.synchronous
    return (
        ours.bytes_per_step / whole.bytes_per_step,
        ours.seconds_per_step / whole.seconds_per_step,
    )


def make_rows(
    model: Model, chosen: argparse.Namespace
) -> Iterator[tuple[str, dict[str, Any], tuple[float, float]]]:
    """Yield each exchange, what trains with each outer optimizer, and what a replica sends."""
    (inner, rate), replicas, size = INNER[chosen.inner], chosen.replicas, chosen.batch
    train = functools.partial(make_trainer, model, chosen.steps, inner)
    shapes = jax.eval_shape(model.initial, 0)
    whole = inner(rate, chosen.steps, shapes)
    yield "in step", {"nats": train(size=replicas * size)}, (1.0, 1.0)
    yield "alone", {"nats": train(size=size)}, (0.0, 0.0)
    for code, compress in CODES.items():
        learn = train(by_diloco(compress=compress), replicas, size)
        for every in PERIODS:
            if not chosen.few or (every, code) in FEW:
                trainers = {
                    outer: functools.partial(learn, *how, every)
                    for outer, how in CENTERS.items()
                    if outer == "nats" or not chosen.averaging
                }
                tx = by_diloco(every, compress=compress)(whole, *CENTERS["nats"])
                yield f"every {every}, {code}", trainers, find_sent(tx, shapes, every, replicas)
    if not chosen.few:
        for name, make in others(chosen.steps).items():
            sent = find_sent(make(whole), shapes, PERIOD, replicas)
            yield name, {"nats": train(make, replicas, size)}, sent


def others(steps: int) -> dict[str, Callable[[Any], Any]]:
    """Return other methods, by a function from the inner optimizer."""
    plan = Every(PERIOD, fragments=4, delay=1)

    def agn(inner: Any, rate: float) -> Any:
        return optperm.agn(inner, adam(rate, steps // PERIOD, None), every=PERIOD, axis_name=AXIS)

    return {
        "agn, outer Adam 0.01": functools.partial(agn, rate=0.01),
        "agn, outer Adam 0.03": functools.partial(agn, rate=0.03),
        "every 10, 4 fragments, delay 1": lambda inner: optperm.diloco(
            inner, optax.sgd(1.0), every=plan, axis_name=AXIS, mixing=0.5
        ),
    }


def find_moves(model: Model, every: int, chosen: argparse.Namespace) -> tuple[float, ...]:
    """Return what one bit loses of a gradient and of a period's move, and the residual over the move.

    One replica is alone, in the middle of a run. What is lost is a fraction of the squared norm.
    """
    (inner, rate), compress = INNER[chosen.inner], Compression(bits=1)
    start = model.initial(0)
    tx = optperm.diloco(inner(rate, chosen.steps, start), every=every, compress=compress)

    def train(carried: Any, key: jax.Array, **extra_args: Any) -> tuple[Any, Any]:
        params, state, _ = carried
        grads = jax.grad(model.loss_fn)(params, model.batch_of(model.data[0], key, chosen.batch))
        return (*make_step(tx, **extra_args)(params, state, grads), grads), None

    @jax.jit
    def run(key: jax.Array) -> tuple[jax.Array, ...]:
        keys = jax.random.split(key, chosen.steps // 2 // every * every + every)
        carried = jax.lax.scan(train, (start, tx.init(start), start), keys[:-every])[0]
        local = functools.partial(train, commit=False)
        params, _, grads = jax.lax.scan(local, carried, keys[-every:])[0]
        move, residual = optax.tree.sub(params, carried[0]), carried[1].residual
        return lost(grads), lost(move), optax.tree.norm(residual) / optax.tree.norm(move)

    def lost(tree: Any) -> jax.Array:
        def error(leaf: jax.Array) -> jax.Array:
            sent = _compression.encode(compress, leaf[None])
            return leaf - _compression.decode(compress, sent, jax.typeof(leaf[None]))[0]

        return (optax.tree.norm(jax.tree.map(error, tree)) / optax.tree.norm(tree)) ** 2

    return tuple(map(float, run(jax.random.key(0))))


def compare_exchanges(chosen: argparse.Namespace) -> None:
    """Show nats per byte on held-out bytes for each exchange."""
    text = "Python's library" if chosen.data is None else chosen.data.stem
    model = of_bytes(chosen.data)
    count = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(model.initial, 0)))
    size = f"{count:,} params, {chosen.steps} steps of {chosen.batch} contexts"
    title = f"Loss by bytes: {text}, {chosen.replicas} replicas, {chosen.inner}, {size}"
    for exchange, trainers, sent in make_rows(model, chosen):
        if not RESULTS.has(title, exchange=exchange):
            show_losses(title, exchange, trainers, sent, chosen)
    title = f"What one bit loses of a squared norm: {text}, {chosen.inner}"
    for every in () if chosen.few else PERIODS:
        if not RESULTS.has(title, every=str(every)):
            names = "of_a_gradient", "of_a_move", "residual_over_move"
            cells = zip(names, find_moves(model, every, chosen), strict=True)
            RESULTS.show(title, every=every, **{name: f"{found:.2f}" for name, found in cells})


PARTS = ("local", "periods", "stacked", "traffic", "commits", "outer", "frontier")


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", choices=PARTS, nargs="+", default=PARTS)
    add("--repetitions", type=int, default=31)
    add("--leaves", type=int, default=100)
    add("--leaf-size", type=int, default=100_000)
    add("--data", type=pathlib.Path, help="an npz of images for outer, or a text for frontier")
    add("--seeds", type=int, default=3, help="runs to average")
    add("--layers", type=int, default=1, help="layers of the decoder")
    add("--width", type=int, default=48, help="its width, a multiple of 4")
    add("--steps", type=int, default=900, help="steps of each run, for frontier")
    add("--batch", type=int, default=2, help="contexts in a step of each replica, for frontier")
    add("--replicas", type=int, default=REPLICAS, help="for frontier")
    add(
        "--inner", choices=INNER, default="Adam", help="the optimizer of the replicas, for frontier"
    )
    add("--few", action="store_true", help="fewer exchanges, for frontier")
    add("--averaging", action="store_true", help="without Nesterov momentum, for frontier")
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
    library_bytes.LAYERS, library_bytes.WIDTH = chosen.layers, chosen.width
    if "outer" in chosen.only:
        compare_outer(chosen.data, chosen.seeds, chosen.json)
    if "frontier" in chosen.only:
        compare_exchanges(chosen)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
