"""AGN and DiLoCo on the devices of two processes, beside the same replicas in one."""

import pathlib
import runpy

import numpy as np
import processes
import pytest

pytestmark = pytest.mark.slow

WORKER = pathlib.Path(__file__).with_name("local_steps_worker.py")


@pytest.fixture(scope="module")
def one():
    """What all replicas hold after each step of each method, trained in one process by `vmap`."""
    worker = runpy.run_path(str(WORKER))
    return dict(worker["trajectories"]("vmap", np.asarray))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The same from two processes of two devices each."""
    folder = tmp_path_factory.mktemp("processes")
    processes.run_workers(WORKER, folder, processes=2, devices=2)
    first, second = (np.load(folder / f"{index}.npz") for index in range(2))
    return {name: np.concatenate([first[name], second[name]]) for name in first}


def of_method(trajectories, method):
    chosen = {n: held for n, held in trajectories.items() if n.startswith(f"{method}/")}
    assert chosen
    return chosen


@pytest.mark.parametrize("method", ["agn mean", "agn sum", "agn sequential", "diloco"])
def test_two_processes_hold_what_one_does(one, two, method):
    """After each step params and center are those of `vmap`; the center is the same bits everywhere."""
    expected, held = of_method(one, method), of_method(two, method)
    assert held.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(held[name], expected[name], rtol=0, atol=1e-6, err_msg=name)
        if "/center/" in name:
            assert {row.tobytes() for row in held[name]} == {held[name][0].tobytes()}, name
    for t in range(6):
        params, center = (held[f"{method}/{t}/{kind}/kernel"] for kind in ("params", "center"))
        if t % 2:  # a commit
            np.testing.assert_array_equal(params, center)
        else:
            assert len(np.unique(params, axis=0)) == 4
    # The replica whose gradient was NaN sat out the second commit.
    np.testing.assert_array_equal(held[f"{method}/2/skipped"], [0, 0, 0, 0])
    np.testing.assert_array_equal(held[f"{method}/5/skipped"], [0, 0, 0, 1])


def test_commit_rules_differ(two):
    """Else the test above would not tell one from another."""
    ends = {two[f"agn {rule}/5/center/kernel"].tobytes() for rule in ("mean", "sum", "sequential")}
    assert len(ends) == 3
