"""Cost of AGN and DiLoCo: local steps, whole periods, replicas in one program, traffic and commits.

Local steps: the time of a whole step (update and applied updates, with donated params and state) for
several optimizers, local with `commit=False` or counted. It is compared with the optimizer alone, and
with AGN's local step written by hand: the optimizer with one float32 accumulator, `total + grads`, in
its state, and the same with a center and the state of its optimizer, which pass through unchanged. The
period is so long that no commit happens.

Periods: ten steps in one scan, nine local steps and one with a commit, compared with ten steps of the
optimizer alone.

Stacked replicas: local steps of four replicas on four virtual devices with `jax.shard_map` of
`jax.vmap`, compared with the optimizer alone in the same layout.

Traffic: the collectives of the compiled step on four virtual devices, compared with synchronous SGD, and
the bytes of streaming and compressed contributions.

Commits: the time of a whole step with a commit and of a step without one, in one program of period 2, on
four virtual devices.

    python benchmarks/agn.py [--repetitions 31] [--leaves 100] [--leaf-size 100000] [--json FILE]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import results
from collectives import find_collectives, traffic
from timing import stepping, take_turns

import optperm

AXIS, REPLICAS, PERIOD = "replica", 4, 10
NEVER = 1_000_000
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


def random_tree(leaves: int, size: int, seed: int) -> dict[str, jax.Array]:
    """Float32 leaves of one size."""
    keys = jax.random.split(jax.random.key(seed), leaves)
    return {f"leaf{i:03d}": jax.random.normal(key, (size,)) for i, key in enumerate(keys)}


def copied(tree: Any) -> Any:
    """A copy to be donated."""
    return jax.block_until_ready(jax.tree.map(lambda x: jnp.array(x, copy=True), tree))


def by_hand(
    tx: optax.GradientTransformation, *, has_center: bool = False
) -> optax.GradientTransformation:
    """The optimizer, and in its state the sum of all gradients, and what a commit would need."""

    def init(params: Any) -> Any:
        center = (params, tx.init(params)) if has_center else ()
        return optax.tree.zeros_like(params), tx.init(params), center

    def update(grads: Any, state: Any, params: Any) -> Any:
        total, inner, center = state
        updates, inner = tx.update(grads, inner, params)
        return updates, (optax.tree.add(total, grads), inner, center)

    return optax.GradientTransformation(init, update)


def make_step(tx: Any, **extra_args: Any) -> Callable[..., Any]:
    """A whole step: update and applied updates."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, **extra_args)
        return optperm.apply_updates(params, updates, state), state

    return step


def medians(
    steps: dict[str, Callable[..., Any]], held: dict[str, Any], grads: Any, repetitions: int
) -> dict[str, float]:
    """The median of each donating step's milliseconds, taken in turn.

    They are those of the processor: what else runs on the machine does not count.
    """
    calls = {peer: stepping(step, held[peer], grads) for peer, step in steps.items()}
    times = take_turns(calls, repetitions, time.process_time)
    return {peer: 1e3 * statistics.median(taken) for peer, taken in times.items()}


def measure_local_steps(name: str, leaves: int, size: int, repetitions: int) -> None:
    """Prints the times of one optimizer's steps."""
    params, grads = random_tree(leaves, size, 0), random_tree(leaves, size, 1)
    bare, local = OPTIMIZERS[name], {"commit": False}
    peers = {
        "bare": (bare, {}),
        "by hand": (by_hand(bare), {}),
        "by hand with a center": (by_hand(bare, has_center=True), {}),
        "agn": (optperm.agn(bare, every=NEVER), local),
        "diloco": (optperm.diloco(bare, every=NEVER), local),
        "agn counted": (optperm.agn(bare, every=NEVER), {}),
        "diloco counted": (optperm.diloco(bare, every=NEVER), {}),
    }
    steps = {
        peer: jax.jit(make_step(tx, **extras), donate_argnums=(0, 1))
        for peer, (tx, extras) in peers.items()
    }
    held = {peer: (copied(params), copied(tx.init(params))) for peer, (tx, _) in peers.items()}
    of = medians(steps, held, grads, repetitions)
    found = {peer: f"{of[peer] / of['bare']:.2f}" for peer in peers if peer != "bare"}
    RESULTS.row("Local steps, as multiples of the bare optimizer's", optimizer=name, **found)
    ratios = "".join(f"  {peer} {ratio}" for peer, ratio in found.items())
    print(f"  {name:9} {of['bare']:9.2f} ms{ratios}  agn/by hand {of['agn'] / of['by hand']:.2f}")


def print_ratios(title: str, name: str, of: dict[str, float]) -> None:
    """Prints all times over that of the bare optimizer."""
    found = {peer: f"{of[peer] / of['bare']:.2f}" for peer in of if peer != "bare"}
    RESULTS.row(title, optimizer=name, **found)
    ratios = "".join(f"  {peer} {ratio}" for peer, ratio in found.items())
    print(f"  {name:9} {of['bare']:9.2f} ms{ratios}")


def measure_periods(name: str, leaves: int, size: int, repetitions: int) -> None:
    """Prints the times of ten steps in one scan, the last of which commits."""
    params, grads = random_tree(leaves, size, 0), random_tree(leaves, size, 1)
    bare = OPTIMIZERS[name]

    def period(tx: Any, **ends: Any) -> Callable[..., Any]:
        local = {"commit": False} if ends else {}

        def run(params: Any, state: Any, grads: Any) -> Any:
            def body(carried: Any, _: None) -> Any:
                return make_step(tx, **local)(*carried, grads), None

            carried, _ = jax.lax.scan(body, (params, state), length=PERIOD - 1)
            return make_step(tx, **ends)(*carried, grads)

        return jax.jit(run, donate_argnums=(0, 1))

    how = {"every": NEVER}  # the last step has commit=True
    peers = {"bare": bare, "agn": optperm.agn(bare, **how), "diloco": optperm.diloco(bare, **how)}
    steps = {
        peer: period(tx, **({} if peer == "bare" else {"commit": True}))
        for peer, tx in peers.items()
    }
    held = {peer: (copied(params), copied(tx.init(params))) for peer, tx in peers.items()}
    of = medians(steps, held, grads, max(3, repetitions // 3))
    print_ratios(f"{PERIOD} steps in a scan, one with a commit", name, of)


def measure_stacked(name: str, leaves: int, size: int, repetitions: int) -> None:
    """Prints the times of local steps of replicas that one program holds."""
    mesh = jax.make_mesh((REPLICAS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,))
    bare, spec = OPTIMIZERS[name], jax.sharding.PartitionSpec(AXIS)
    place = jax.sharding.NamedSharding(mesh, spec)

    def stacked(tree: Any) -> Any:
        rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (REPLICAS, *x.shape)), tree)
        return copied(jax.device_put(rows, place))

    peers = {
        "bare": (bare, {}),
        "by hand": (by_hand(bare, has_center=True), {}),
        "agn": (optperm.agn(bare, every=NEVER, axis_name=AXIS), {"commit": False}),
        "diloco": (optperm.diloco(bare, every=NEVER, axis_name=AXIS), {"commit": False}),
    }
    params, grads = random_tree(leaves, size, 0), stacked(random_tree(leaves, size, 1))
    steps = {
        peer: jax.jit(
            jax.shard_map(
                jax.vmap(make_step(tx, **extras)), mesh=mesh, in_specs=spec, out_specs=spec
            ),
            donate_argnums=(0, 1),
        )
        for peer, (tx, extras) in peers.items()
    }
    held = {peer: (stacked(params), stacked(tx.init(params))) for peer, (tx, _) in peers.items()}
    of = medians(steps, held, grads, repetitions)
    print_ratios(f"Local steps of {REPLICAS} replicas in one program", name, of)


def on_replicas(tx: optax.GradientTransformation, *, synchronous: bool = False) -> Any:
    """A whole step on all replicas; params and state are donated."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        if synchronous:
            grads = jax.lax.pmean(grads, AXIS)
        return make_step(tx)(params, state, grads)

    return jax.pmap(
        step, axis_name=AXIS, devices=jax.devices("cpu")[:REPLICAS], donate_argnums=(0, 1)
    )


def replicated(tree: Any) -> Any:
    """One copy for each replica, along a leading axis."""
    place = jax.pmap(lambda x: x, devices=jax.devices("cpu")[:REPLICAS])
    return jax.tree.map(lambda x: place(jnp.broadcast_to(x, (REPLICAS, *x.shape))), tree)


def methods(optimizer: optax.GradientTransformation, period: int) -> dict[str, Any]:
    """AGN by each rule, and DiLoCo."""
    how = {"every": period, "axis_name": AXIS}
    rules = {f"agn {rule}": optperm.agn(optimizer, combine=rule, **how) for rule in RULES}
    return rules | {"diloco": optperm.diloco(optimizer, **how)}


def print_traffic() -> None:
    """Prints what the compiled steps send."""
    params = {
        "hidden": {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)},
        "output": {"kernel": jnp.zeros((128, 10)), "bias": jnp.zeros(10)},
    }
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"Traffic of each device: {count} float32 params in 4 leaves, period {PERIOD}")
    peers = {"synchronous": SGD} | methods(SGD, PERIOD)
    exchanges: dict[str, dict[str, Any]] = {
        "4 fragments": {"every": optperm.distributed.Every(PERIOD, fragments=4)},
        "4 bits": {"every": PERIOD, "compress": optperm.distributed.Compression(bits=4)},
        "top 3 %, 2 bits": {
            "every": PERIOD,
            "compress": optperm.distributed.Compression(1 / 32, bits=2),
        },
    }
    for peer, options in exchanges.items():
        peers[peer] = optperm.diloco(SGD, axis_name=AXIS, **options)
    synchronous = 0.0
    for name, tx in peers.items():
        step = on_replicas(tx, synchronous=name == "synchronous")
        stacked = replicated(params)
        compiled = step.lower(stacked, replicated(tx.init(params)), stacked).compile()
        hlo = compiled.as_text()
        _, size = traffic(hlo, PERIOD)
        synchronous = synchronous or size
        found = ", ".join(
            f"{each.operation} of {each.bytes} bytes"
            + (" in a conditional" if each.is_conditional else " in every step")
            for each in find_collectives(hlo)
        )
        ratio = f"{size / synchronous:.6f}"
        RESULTS.row("Traffic", method=name, bytes_a_step=f"{size:,.1f}", of_synchronous=ratio)
        print(f"  {name:15} {size:9.1f} bytes/step ({ratio}): {found}")


def measure_commits(name: str, leaves: int, size: int, repetitions: int) -> None:
    """Prints the times of steps with and without a commit."""
    params, grads = random_tree(leaves, size, 0), replicated(random_tree(leaves, size, 1))
    peers = methods(OPTIMIZERS[name], 2)
    calls = {}
    for peer, tx in peers.items():  # of a period of two steps the first is local
        call = stepping(on_replicas(tx), (replicated(params), replicated(tx.init(params))), grads)
        calls |= {f"{peer}, local": call, f"{peer}, commit": call}
    times = take_turns(calls, repetitions)
    of = {name: 1e3 * statistics.median(taken) for name, taken in times.items()}
    for peer in peers:
        without, with_ = of[f"{peer}, local"], of[f"{peer}, commit"]
        cells = {"local_ms": f"{without:.2f}", "commit_ms": f"{with_:.2f}"}
        RESULTS.row("Commits", optimizer=name, method=peer, **cells)
        print(
            f"  {name:9} {peer:15} local {without:7.2f} ms  commit {with_:7.2f} ms: "
            f"{with_ / without:.2f} local steps, {with_ / of['agn mean, commit']:.2f} of agn mean"
        )


def main() -> None:
    """Measures all three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repetitions", type=int, default=31)
    parser.add_argument("--leaves", type=int, default=100)
    parser.add_argument("--leaf-size", type=int, default=100_000)
    results.add_argument(parser)
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    leaves, size, repetitions = chosen.leaves, chosen.leaf_size, chosen.repetitions
    print(f"Local steps: {leaves} leaves of {size} float32; as multiples of the bare optimizer")
    for name in OPTIMIZERS:
        measure_local_steps(name, leaves, size, repetitions)
    print(f"Periods: {PERIOD} steps in a scan, one of them with a commit; as multiples of the bare")
    for name in OPTIMIZERS:
        measure_periods(name, leaves, size, repetitions)
    few = max(1, leaves // REPLICAS)
    print(f"Stacked: local steps of {few} such leaves on each of {REPLICAS} replicas; as multiples")
    for name in OPTIMIZERS:
        measure_stacked(name, few, size, repetitions)
    print_traffic()
    # Four replicas share this machine, so each has a quarter of the leaves.
    print(f"Commits: {few} leaves of {size} float32 on each of {REPLICAS} replicas")
    for name in COMMITTING:
        measure_commits(name, few, size, repetitions)
    RESULTS.write(chosen.json)


if __name__ == "__main__":
    main()
