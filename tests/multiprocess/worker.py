"""One of the processes of `test_multiprocess`: `python worker.py ADDRESS PROCESSES INDEX FOLDER`.

Each trains by three methods over the devices of all processes, and saves what it holds of each; then all
call `fit` together.
"""

import pathlib
import sys

import dim_reduce_reference as golden
import fitting_together
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import replicas
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm

SIZE = 4


def loss_fn(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2)


# SVRG, as a user of `jax.distributed` writes it: each process reads its own part of the data, and what
# it lacks for a whole batch is filled up and given the weight 0.

EXAMPLES, LOCAL_BATCH = 26, 4
TX = optax.chain(optperm.svrg(0.9), optax.sgd(0.05))
svrg_step = loops.compiled(TX, loops.evaluation(loss_fn))


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
    return [replicas.take(cut, i) for i in range(count)], list(weights.reshape(count, LOCAL_BATCH))


def train_svrg(params, full_gradient, batch_of):
    """Params after eight steps, and the full gradient of the second snapshot."""
    opt_state = jax.jit(TX.init)(params)
    for t in range(8):
        if t % 4 == 0:
            full_grad = full_gradient(params)
            opt_state = optperm.variance.take_snapshot(opt_state, params, full_grad)
        params, opt_state = svrg_step(params, opt_state, batch_of(t))
    return params, full_grad


def svrg(index):
    """Arrays sharded over all devices of all processes; and a full gradient by `jax.pmap`."""
    mesh = Mesh(np.array(jax.devices()), ("data",))

    def place(local):
        return jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), local)

    batches, weights = padded_batches(part_of(index), count=4)

    def full_gradient(params):
        return optperm.variance.full_gradient(
            loss_fn, params, map(place, batches), weights=map(place, weights)
        )

    devices = jax.local_device_count()
    by_pmap = jax.pmap(
        lambda params, batches, weights: optperm.variance.full_gradient(
            loss_fn, params, batches, weights=weights, axis_name="data"
        ),
        axis_name="data",
        in_axes=(None, 0, 0),
    )
    with jax.enable_x64(True):
        params = jax.device_put(start(), NamedSharding(mesh, P()))
        held = train_svrg(params, full_gradient, lambda t: place(step_batch(index, t)))
        split = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), (batches, weights))
        of_pmap = jax.tree.map(lambda x: x.addressable_data(0), by_pmap(start(), *split))
        trees = zip(("trained", "full_grad", "pmap"), (*held, of_pmap), strict=True)
        return {f"{kind}_{k}": np.asarray(v) for kind, tree in trees for k, v in tree.items()}


# AGN and DiLoCo: replicas are mapped over the devices.

PERIOD, STEPS = 2, 6
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
METHODS = {
    **{
        f"agn {commit}": optperm.agn(
            OPTIMIZER, every=PERIOD, axis_name=replicas.AXIS, combine=commit
        )
        for commit in ("mean", "sum", "sequential")
    },
    "diloco": optperm.diloco(OPTIMIZER, every=PERIOD, axis_name=replicas.AXIS),
}


def make_batches():
    """For each step a batch for each replica. In the second period one of the last replica's is bad."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(STEPS, SIZE, 5, 3)).astype(np.float32)
    y = x @ np.arange(1, 4, dtype=np.float32) + np.arange(SIZE, dtype=np.float32)[:, None]
    y[PERIOD, -1, 0] = np.nan
    return [{"x": x[t], "y": y[t]} for t in range(STEPS)]


def trajectories(mapping, collect):
    """For each method and step: the params, the center and the skipped commits of the replicas."""
    start = {"kernel": np.zeros(3, np.float32), "bias": np.ones((), np.float32)}
    for method, tx in METHODS.items():
        evaluate = loops.gradient(loss_fn)
        steps = loops.train(tx, start, make_batches(), evaluate=evaluate, how=mapping, size=SIZE)
        for t, (params, opt_state) in enumerate(steps):
            center = optperm.distributed.center_params(opt_state, final=(t + 1) % PERIOD == 0)
            for name in start:
                yield f"{method}/{t}/params/{name}", collect(params[name])
                yield f"{method}/{t}/center/{name}", collect(center[name])
            yield f"{method}/{t}/skipped", collect(opt_state.skipped)


def local_steps(index):
    del index
    return dict(trajectories("shard_map", replicas.own))


def dim_reduce(index):
    """The golden problem, its basis spread over the devices."""
    del index
    data, mapped = golden.load("stiff"), replicas.MAPPINGS["shard_map"]
    held = {"params": [], "lengths": []}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        tx = golden.optimizer(data, axis_name=replicas.AXIS)
        params = replicas.stack([golden.split(data["x0"])] * SIZE)
        basis = golden.split(data["P"])
        opt_state = mapped(lambda p: optperm.subspace.set_basis(tx.init(p), basis), SIZE)(params)
        step = mapped(loops.make_step(tx, loops.evaluation(golden.loss_of(data))), SIZE)
        for noise in data["noise"]:
            params, opt_state = step(params, opt_state, np.stack([noise] * SIZE))
            held["params"].append(golden.join(jax.tree.map(replicas.own, params)))
            held["lengths"].append(replicas.own(opt_state.step_length))
        return held | {"rows": replicas.own(opt_state.subspace.rows["v"])}


def main(address, processes, index, folder):
    jax.distributed.initialize(address, int(processes), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (SIZE, SIZE // int(processes))
    for train in (svrg, local_steps, dim_reduce):
        np.savez(pathlib.Path(folder) / f"{train.__name__}-{index}", **train(int(index)))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fitting_together.main(index, pathlib.Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
