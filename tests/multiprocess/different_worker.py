"""One of two processes with methods that differ; `different_worker.py ADDRESS PROCESSES INDEX`.

Each process refuses to train, where the exchanges of one would wait for those of the other.
"""

import sys

import fitting
import jax
import optax
import pytest

import optperm
from optperm import training


def main(address, processes, index):
    jax.distributed.initialize(address, int(processes), int(index))

    def fit(tx, axis_name):
        batches = [jax.tree.map(lambda leaf: leaf[:3], fitting.data())] * 4
        state = fitting.linen_state(tx)
        return training.fit(state, fitting.linen_loss, batches, epochs=1, axis_name=axis_name)

    local = optperm.diloco(optax.sgd(0.1), every=2 + int(index), axis_name="replica")
    for tx, axis_name in ((local, "replica"), (optax.sgd(0.1 + int(index)), None)):
        with pytest.raises(ValueError, match="compiled different programs"):
            fit(tx, axis_name)
    assert fit(optax.sgd(0.1), None).step == 4


if __name__ == "__main__":
    main(*sys.argv[1:])
