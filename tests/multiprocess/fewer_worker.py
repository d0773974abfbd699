"""One of several processes of one device each, the last of which dies in its first run.

`fewer_worker.py ADDRESS PROCESSES INDEX FOLDER`: two processes go on with what three began.
"""

import os
import pathlib
import sys
import time

import fitting
import jax
import numpy as np

BATCH, STEPS = 12, 9  # a commit after each third step; the checkpoint is between two


def train(folder, **options):
    """From the last checkpoint in a folder, if there is one."""
    return fitting.fit(
        "linen",
        "diloco",
        steps=STEPS,
        batch_size=BATCH,
        checkpoints=folder,
        checkpoint_every=4,
        resume=True,
        **options,
    )


def die(event, folder):
    """Ends the process without a word, once the first checkpoint is whole."""
    deadline = time.monotonic() + 60
    while event.step == 5 and time.monotonic() < deadline:
        if (folder / "4").exists():
            os._exit(9)
        time.sleep(0.01)


def main(address, processes, index, folder):
    jax.distributed.initialize(address, int(processes), int(index))
    folder = pathlib.Path(folder)
    every = {1: lambda event: die(event, folder / "kept")} if index == "2" else {1: lambda _: None}
    result = train(folder / "kept", devices=1, every=every)
    params = {name: np.asarray(leaf) for name, leaf in result.state.params["Dense_0"].items()}
    np.savez(folder / f"ended-{index}", loss=result.history.steps["loss"], **params)


if __name__ == "__main__":
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        main(*sys.argv[1:])
