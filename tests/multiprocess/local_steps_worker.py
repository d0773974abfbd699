"""One of the processes of `test_local_steps`: `python FILE ADDRESS PROCESSES INDEX FOLDER`.

Replicas are mapped over the devices of all processes; each process saves what its own replicas hold.
"""

import pathlib
import sys

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import replicas

import optperm

SIZE, PERIOD, STEPS = 4, 2, 6
OPTIMIZER = optax.sgd(0.05, momentum=0.9)
METHODS = {
    **{
        f"agn {commit}": optperm.agn(OPTIMIZER, PERIOD, axis_name=replicas.AXIS, commit=commit)
        for commit in ("mean", "sum", "sequential")
    },
    "diloco": optperm.diloco(OPTIMIZER, sync_every=PERIOD, axis_name=replicas.AXIS),
}


def loss_fn(params, batch):
    error = batch["x"] @ params["kernel"] + params["bias"] - batch["y"]
    return jnp.mean(error**2)


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
            center = optperm.center_params(opt_state)
            for name in start:
                yield f"{method}/{t}/params/{name}", collect(params[name])
                yield f"{method}/{t}/center/{name}", collect(center[name])
            yield f"{method}/{t}/skipped", collect(opt_state.skipped)


def main(address, processes, index, folder):
    jax.distributed.initialize(address, int(processes), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (SIZE, SIZE // int(processes))
    held = dict(trajectories("shard_map", replicas.own))
    np.savez(pathlib.Path(folder) / f"{index}.npz", **held)


if __name__ == "__main__":
    main(*sys.argv[1:])
