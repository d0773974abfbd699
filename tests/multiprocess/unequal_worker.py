"""One of two processes with different numbers of devices; `unequal_worker.py ADDRESS PROCESSES INDEX`.

Each process refuses to train.
"""

import sys

import fitting
import jax
import pytest

from optperm import training


def main(address, processes, index):
    jax.config.update("jax_num_cpu_devices", 1 + int(index))
    jax.distributed.initialize(address, int(processes), int(index))
    state = fitting.linen_state(fitting.method("adam"))
    with pytest.raises(ValueError, match=r"The processes have \[1, 2\] devices"):
        training.fit(state, fitting.linen_loss, fitting.data(), epochs=1, batch_size=6)


if __name__ == "__main__":
    main(*sys.argv[1:])
