"""One of the processes of `test_dim_reduce`: `python FILE ADDRESS PROCESSES INDEX FOLDER`.

The golden problem, its basis spread over the devices of all processes; each saves what it holds.
"""

import pathlib
import sys

import dim_reduce_reference as golden
import jax
import loops
import numpy as np
import replicas

import optperm

SIZE = 4


def main(address, processes, index, folder):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_numpy_dtype_promotion", "standard")  # optimizers of Optax
    jax.distributed.initialize(address, int(processes), int(index))
    assert (jax.device_count(), jax.local_device_count()) == (SIZE, SIZE // int(processes))
    data = golden.load("stiff")
    tx = golden.optimizer(data, axis_name=replicas.AXIS)
    mapped = replicas.MAPPINGS["shard_map"]
    params = replicas.stack([golden.split(data["x0"])] * SIZE)
    basis = golden.split(data["P"])
    opt_state = mapped(lambda p: optperm.set_basis(tx.init(p), basis), SIZE)(params)
    step = mapped(loops.make_step(tx, loops.evaluation(golden.loss_of(data))), SIZE)
    held = {"params": [], "lengths": []}
    for noise in data["noise"]:
        params, opt_state = step(params, opt_state, np.stack([noise] * SIZE))
        held["params"].append(
            golden.join({name: replicas.own(leaf) for name, leaf in params.items()})
        )
        held["lengths"].append(replicas.own(opt_state.step_length))
    held["rows"] = replicas.own(opt_state.subspace.rows["v"])
    np.savez(pathlib.Path(folder) / f"{index}.npz", **held)


if __name__ == "__main__":
    main(*sys.argv[1:])
