"""Two processes of two devices train like one process: AGN, DiLoCo, DimReduce, `fit`."""

import pathlib
import runpy
import types

import dim_reduce_reference as golden
import fitting
import jax
import numpy as np
import processes
import pytest

pytestmark = pytest.mark.programs

FOLDER = pathlib.Path(__file__).parent


def test_two_processes_are_one(tmp_path):
    """One pair of processes trains by all methods, and by `fit`: each is what it is in one process."""
    processes.run_workers(FOLDER / "worker.py", tmp_path)
    worker = types.SimpleNamespace(**runpy.run_path(str(FOLDER / "worker.py")))
    for check in (check_local_steps, check_dim_reduce):
        name = check.__name__.removeprefix("check_")
        held = (np.load(tmp_path / f"{name}-{index}.npz") for index in range(2))
        check(worker, *map(dict, held))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        check_fit(tmp_path)


def check_local_steps(worker, first, second):
    """After each step, params and center equal `vmap`'s; all replicas have the same center."""
    expected = dict(worker.trajectories("vmap", np.asarray))
    assert first.keys() == second.keys() == expected.keys()
    held = {name: np.concatenate([first[name], second[name]]) for name in first}
    for name, wanted in expected.items():
        np.testing.assert_allclose(held[name], wanted, rtol=0, atol=1e-6, err_msg=name)
        if "/center/" in name:
            assert {row.tobytes() for row in held[name]} == {held[name][0].tobytes()}, name
    for method in worker.METHODS:
        for t in range(worker.STEPS):
            params, center = (held[f"{method}/{t}/{kind}/kernel"] for kind in ("params", "center"))
            if t % 2:  # a commit
                np.testing.assert_array_equal(params, center)
            else:
                assert len(np.unique(params, axis=0)) == 4
        # The replica whose gradient was NaN sat out the second commit.
        np.testing.assert_array_equal(held[f"{method}/2/skipped"], [0, 0, 0, 0])
        # A bad gradient counts as zero in DiLoCo, whose params it leaves finite.
        sat_out = [0, 0, 0, int(method != "diloco")]
        np.testing.assert_array_equal(held[f"{method}/5/skipped"], sat_out)
    # Else the numbers would not tell one rule from another.
    ends = {held[f"agn {rule}/5/center/kernel"].tobytes() for rule in ("mean", "sum", "sequential")}
    assert len(ends) == 3


def check_dim_reduce(worker, *both):
    """The golden sequence: every replica's params and step lengths to 1e-9, half of the rows each."""
    data = golden.load("stiff")
    for name, wanted in (("params", data["params"]), ("lengths", data["step"])):
        found = np.concatenate([own[name] for own in both], axis=1)
        np.testing.assert_allclose(found, np.stack([wanted] * 4, axis=1), rtol=0, atol=1e-9)
    rows = golden.split(data["P"])["v"]
    for index, own in enumerate(both):
        own_rows = own["rows"].reshape(-1, rows.shape[1])
        np.testing.assert_array_equal(own_rows, rows[4 * index : 4 * index + 4])


def check_fit(folder):
    """From arrays; one process also resumes from a checkpoint of both."""
    for name in ("svrg", "agn"):
        alone = fitting.fit("linen", name, epochs=2, devices=4).history.steps["loss"]
        for index in range(2):
            with np.load(folder / f"fit-{name}-{index}.npz") as file:
                np.testing.assert_allclose(file["loss"], alone, rtol=2e-4)
    where = {"checkpoints": folder / "agn", "checkpoint_every": 3}
    gone_on = fitting.fit("linen", "agn", epochs=2, devices=4, resume=3, **where)
    np.testing.assert_allclose(gone_on.history.steps["loss"], alone, rtol=2e-4)
