"""One of the processes of `test_svrg`: `python svrg_worker.py ADDRESS PROCESSES INDEX FOLDER`.

Also what a user of `jax.distributed` writes: each process reads its own part of the data, and what it
lacks for a whole batch is filled up and given the weight 0.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm

EXAMPLES, STEPS, LOCAL_BATCH = 26, 8, 4
TX = optax.chain(optperm.svrg(0.9), optax.sgd(0.05))


def loss_fn(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2)


step = loops.compiled(TX, loops.evaluation(loss_fn))


def start():
    return {"kernel": jnp.zeros(3), "bias": jnp.ones(())}


def make_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 3))
    return {"x": x, "y": x @ np.arange(1.0, 4.0) + rng.normal(size=EXAMPLES)}


def part_of(index):
    """Uneven parts: the first process has 15 examples, the second 11."""
    return {k: np.split(v, [15])[index] for k, v in make_data().items()}


def step_batch(index, t):
    """What a process brings to a training step."""
    return {k: v[t % 3 : t % 3 + LOCAL_BATCH] for k, v in part_of(index).items()}


def padded_batches(data, count):
    """Batches of one size, with the weights of their examples; as many in every process."""
    fill = count * LOCAL_BATCH - len(data["y"])
    full = {k: np.pad(v, [(0, fill)] + [(0, 0)] * (v.ndim - 1)) for k, v in data.items()}
    weights = np.repeat([1.0, 0.0], [len(data["y"]), fill])
    cut = {k: v.reshape(count, LOCAL_BATCH, *v.shape[1:]) for k, v in full.items()}
    return [{k: v[i] for k, v in cut.items()} for i in range(count)], list(
        weights.reshape(count, LOCAL_BATCH)
    )


def train_on_mesh(index):
    """Arrays sharded over all devices of all processes, under `jax.jit`."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def place(local):
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)

    params = jax.device_put(start(), NamedSharding(mesh, P()))
    opt_state = jax.jit(TX.init)(params)
    for t in range(STEPS):
        if t % 4 == 0:
            batches, weights = padded_batches(part_of(index), count=4)
            full_grad = optperm.full_gradient(
                loss_fn, params, (place(b) for b in batches), weights=map(place, weights)
            )
            opt_state = optperm.take_snapshot(opt_state, params, full_grad)
        params, opt_state = step(params, opt_state, place(step_batch(index, t)))
    return params, full_grad


def full_gradient_by_pmap(index):
    """At the initial params, each device with batches of its own, summed over all of them."""
    local = padded_batches(part_of(index), count=4)
    devices = jax.local_device_count()
    split = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), local)
    run = jax.pmap(
        lambda params, batches, weights: optperm.full_gradient(
            loss_fn, params, batches, weights=weights, axis_name="data"
        ),
        axis_name="data",
        in_axes=(None, 0, 0),
    )
    return run(start(), *split)


def main(address, processes, index, folder):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, int(processes), int(index))
    trained, full_grad = train_on_mesh(int(index))
    by_pmap = full_gradient_by_pmap(int(index))
    np.savez(
        pathlib.Path(folder) / f"{index}.npz",
        devices=jax.device_count(),
        **{f"trained_{k}": np.asarray(v) for k, v in trained.items()},
        **{f"full_grad_{k}": np.asarray(v) for k, v in full_grad.items()},
        **{f"pmap_{k}": np.asarray(v.addressable_data(0)) for k, v in by_pmap.items()},
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
