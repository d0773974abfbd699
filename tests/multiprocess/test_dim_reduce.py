"""DimReduce with its basis spread over the devices of two processes, against the golden sequence."""

import pathlib

import dim_reduce_reference as golden
import numpy as np
import processes
import pytest

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("dim_reduce_worker.py")


def test_two_processes_give_the_golden_sequence(tmp_path):
    """Every replica's params and step lengths to 1e-9; each process holds half of the rows."""
    processes.run_workers(WORKER, tmp_path, processes=2, devices=2)
    data = golden.load("stiff")
    rows = golden.split(data["P"])["v"]
    for index in range(2):
        held = np.load(tmp_path / f"{index}.npz")
        assert held["params"].shape == (len(data["noise"]), 2, len(data["x0"]))
        for device in range(2):
            np.testing.assert_allclose(held["params"][:, device], data["params"], rtol=0, atol=1e-9)
            np.testing.assert_allclose(held["lengths"][:, device], data["step"], rtol=0, atol=1e-9)
        own = held["rows"].reshape(-1, rows.shape[1])
        np.testing.assert_array_equal(own, rows[4 * index : 4 * index + 4])
