"""`fit` in two processes of two devices, beside one of four."""

import pathlib

import fitting
import numpy as np
import processes
import pytest

WORKER = pathlib.Path(__file__).with_name("fit_worker.py")


@pytest.mark.slow
def test_two_processes_train_as_one(lenient, tmp_path):
    """From arrays and from an iterable; stopped and resumed; a callback and a mistake in one of them."""
    processes.run_workers(WORKER, tmp_path)
    for name in ("svrg", "agn"):
        alone = fitting.fit("linen", name, epochs=2, devices=4).history.steps["loss"]
        for index in range(2):
            with np.load(tmp_path / f"{name}-{index}.npz") as file:
                np.testing.assert_allclose(file["loss"], alone, rtol=2e-4)
