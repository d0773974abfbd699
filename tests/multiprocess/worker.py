"""One of the processes of `test_multiprocess`: `python worker.py ADDRESS PROCESSES INDEX FOLDER`.

Each trains by two methods over the devices of all processes, and saves what it holds of each; then all
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

import optperm

SIZE = 4


def own(array):
    """Return the part of a stacked array on the devices of this process."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start)
    return np.concatenate([shard.data for shard in shards])


# AGN and DiLoCo: replicas are mapped over the devices.

PERIOD, STEPS = 2, 6
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
OPTIONS = {"every": PERIOD, "axis_name": replicas.AXIS}
METHODS = {
    f"agn {rule}": optperm.agn(OPTIMIZER, combine=rule, **OPTIONS)
    for rule in ("mean", "sum", "sequential")
} | {"diloco": optperm.diloco(OPTIMIZER, **OPTIONS)}


def make_targets():
    """For each step a target for each replica. In the second period one of the last replica's is bad."""
    rng = np.random.default_rng(0)
    kernel, bias = (np.float32(rng.normal(size=(STEPS, SIZE, *shape))) for shape in ((3,), ()))
    kernel[PERIOD, -1, 0] = np.nan
    return [{"kernel": kernel[t], "bias": bias[t]} for t in range(STEPS)]


def evaluate(params, target):
    """Return the gradient of half the squared distance to a target."""
    return jax.tree.map(jnp.subtract, params, target), {}


def trajectories(mapping, collect):
    """For each method and step: the params, the center and the skipped commits of the replicas."""
    start = {"kernel": np.zeros(3, np.float32), "bias": np.ones((), np.float32)}
    options = {"evaluate": evaluate, "how": mapping, "size": SIZE}
    for method, tx in METHODS.items():
        for t, (params, opt_state) in enumerate(loops.train(tx, start, make_targets(), **options)):
            center = optperm.distributed.center_params(opt_state, final=(t + 1) % PERIOD == 0)
            for name in start:
                yield f"{method}/{t}/params/{name}", collect(params[name])
                yield f"{method}/{t}/center/{name}", collect(center[name])
            yield f"{method}/{t}/skipped", collect(opt_state.skipped)


def dim_reduce():
    """The golden problem, its basis spread over the devices."""
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
            held["params"].append(golden.join(jax.tree.map(own, params)))
            held["lengths"].append(own(opt_state.step_length))
        return held | {"rows": own(opt_state.subspace.rows["v"])}


def main(address, processes, index, folder):
    jax.distributed.initialize(address, int(processes), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (SIZE, SIZE // int(processes))
    folder = pathlib.Path(folder)
    np.savez(folder / f"local_steps-{index}", **dict(trajectories("shard_map", own)))
    np.savez(folder / f"dim_reduce-{index}", **dim_reduce())
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        fitting_together.main(index, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
