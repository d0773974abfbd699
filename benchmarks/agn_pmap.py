"""AGN and DiLoCo compared with synchronous data parallelism: four devices, with `jax.pmap`.

A small network learns scikit-learn's digits, of which each replica has a quarter. A replica trains with
the mean of all gradients in every step, or (AGN, DiLoCo) alone with a collective every ten steps.

    python benchmarks/agn_pmap.py [--seeds N] [--out FILE.png]
"""

import argparse
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.style
import numpy as np
import optax
from collectives import Traffic, traffic
from digits import MLP, accuracy, cross_entropy, load
from matplotlib.figure import Figure

import optperm
from optperm.distributed import center_params

AXIS, REPLICAS, PERIOD, STEPS, BATCH = "replica", 4, 10, 600, 16
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)  # the paper's: good at a small rate of replicas
METHODS = {
    "synchronous": optax.adam(0.01),
    "AGN": optperm.agn(optax.adam(0.01), every=PERIOD, axis_name=AXIS, combine="mean"),
    "DiLoCo": optperm.diloco(optax.adam(1e-3), OUTER, every=PERIOD, axis_name=AXIS),
}


class Result(NamedTuple):
    """What a method reached and what it took, means over the seeds; traffic as the program has it."""

    curves: np.ndarray  # training loss and test accuracy after each period, (periods, 2)
    traffic: Traffic
    seconds: float


def train(method: str, on_replicas: Any, seeds: int) -> Result:
    """Trains by a method; `on_replicas` maps a function over all replicas, along a leading axis."""
    tx = METHODS[method]
    (x_train, y_train), (x_test, y_test) = jax.tree.map(jnp.asarray, load())

    def loss_fn(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return cross_entropy(MLP().apply(params, x), y)

    def init(seed: jax.Array) -> tuple[Any, ...]:
        params, key = MLP().init(jax.random.key(seed), x_train[:1]), jax.random.key(seed)
        return params, tx.init(params), jax.random.fold_in(key, jax.lax.axis_index(AXIS))

    def step(params: Any, opt_state: Any, key: jax.Array, *, commit: bool) -> tuple[Any, ...]:
        key, draw = jax.random.split(key)
        indices = jax.random.randint(draw, (BATCH,), 0, len(x_train) // REPLICAS)
        own = REPLICAS * indices + jax.lax.axis_index(AXIS)
        grads = jax.grad(loss_fn)(params, x_train[own], y_train[own])
        grads = jax.lax.pmean(grads, AXIS) if method == "synchronous" else grads
        updates, opt_state = tx.update(grads, opt_state, params, commit=commit)
        return optperm.apply_updates(params, updates, opt_state), opt_state, key

    @jax.jit
    def evaluate(params: Any) -> tuple[jax.Array, jax.Array]:
        return loss_fn(params, x_train, y_train), accuracy(MLP().apply(params, x_test), y_test)

    def compiled(commit: bool) -> Any:
        mapped = on_replicas(functools.partial(step, commit=commit), donate_argnums=(0, 1, 2))
        return mapped.lower(*start(np.zeros(REPLICAS, int))).compile()

    start = on_replicas(init)
    programs, curves, seconds = (compiled(False), compiled(True)), [], 0.0
    for seed in range(seeds):
        carry = start(np.full(REPLICAS, seed))
        for _ in range(STEPS // PERIOD):
            began = time.perf_counter()
            for index in range(1, PERIOD + 1):
                carry = jax.block_until_ready(programs[index == PERIOD](*carry))
            seconds += time.perf_counter() - began
            params = carry[0] if method == "synchronous" else center_params(carry[1])
            curves.append(evaluate(jax.tree.map(lambda x: x.addressable_data(0)[0], params)))
    both = zip(*(traffic(program.as_text(), 1) for program in programs), strict=True)
    a_step = Traffic(*(((PERIOD - 1) * local + last) / PERIOD for local, last in both))
    return Result(np.array(curves).reshape(seeds, -1, 2).mean(axis=0), a_step, seconds / seeds)


@matplotlib.style.context("optperm.pictures")
def report(results: dict[str, Result], seeds: int, out: Any) -> None:
    """Prints the table and draws the curves."""
    print(f"{STEPS} steps on {REPLICAS} devices, bytes those of each; seeds averaged: {seeds}")
    print("method       test accuracy  collectives/step  bytes/step  bytes in all  seconds")
    left, right = (figure := Figure()).subplots(1, 2)
    for name, (curves, (collectives, size), seconds) in results.items():
        sent = f"{collectives:16.1f}  {size:10.1f}  {size * STEPS:12.0f}"
        print(f"{name:11}  {curves[-1, 1]:13.4f}  {sent}  {seconds:7.2f}")
        for axes, curve in zip((left, right), curves.T, strict=True):
            axes.plot(PERIOD * np.arange(1, len(curve) + 1), curve)
    left.set(xlabel="step", ylabel="training loss", yscale="log")
    right.set(xlabel="step", ylabel="test accuracy", ylim=(0.9, 1.0))
    figure.legend(left.lines, results, loc="outside lower center", ncols=len(results))
    figure.savefig(out)


def main() -> None:
    """Trains by every method, and reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3, help="trainings to average")
    parser.add_argument("--out", default="agn_pmap.png", help="the file for the picture")
    chosen = parser.parse_args()
    # Where there are too few devices, the processor stands in for four. JAX asks when it starts.
    jax.config.update("jax_num_cpu_devices", REPLICAS)
    devices = jax.devices() if jax.device_count() >= REPLICAS else jax.devices("cpu")
    on_replicas = functools.partial(jax.pmap, axis_name=AXIS, devices=devices[:REPLICAS])
    results = {method: train(method, on_replicas, chosen.seeds) for method in METHODS}
    report(results, chosen.seeds, chosen.out)


if __name__ == "__main__":
    main()
