"""One of several processes that call `fit` together: `fit_worker.py ADDRESS PROCESSES INDEX FOLDER`."""

import pathlib
import sys

import fitting
import jax
import numpy as np
import support

METHODS = ("svrg", "agn")


def part(epoch):
    """Of each batch what this process brings: as the arrays are dealt out."""
    for batch in fitting.batches(epoch):
        halves = {name: np.split(leaf, 2) for name, leaf in batch.items()}
        yield {name: parts[jax.process_index()] for name, parts in halves.items()}


def main(address, processes, index, folder):
    jax.distributed.initialize(address, int(processes), int(index))
    folder = pathlib.Path(folder)
    for name in METHODS:
        where = {"checkpoints": folder / name, "checkpoint_every": 3}
        whole = fitting.fit("linen", name, epochs=2, devices=2)
        fitting.fit("linen", name, steps=4, devices=2, **where)
        # Process 0 has the checkpoint for all.
        resumed = fitting.fit("linen", name, epochs=2, devices=2, resume=3, **where)
        support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(whole))
        np.savez(folder / f"{name}-{index}", loss=whole.history.steps["loss"])
    streamed = fitting.fit("linen", "agn", epochs=2, devices=2, train_data=part)
    np.testing.assert_allclose(
        streamed.history.steps["loss"], whole.history.steps["loss"], rtol=1e-5
    )
    # A callback in one of them stops all.
    stopped = fitting.fit(
        "linen",
        "agn",
        epochs=2,
        devices=2,
        on_batch_end=lambda event: event.step == 2 and index == "1",
    )
    assert (stopped.ended, stopped.step) == ("stopped", 2)
    refused = ""
    try:
        fitting.fit("linen", "agn", epochs=2, devices=2, seed=int(index))
    except ValueError as error:
        refused = str(error)
    assert "not the same in all processes" in refused, refused


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        main(*sys.argv[1:])
