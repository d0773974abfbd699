"""SVRG with the data split over two processes, beside one process that has all of it."""

import importlib.util
import pathlib

import jax
import numpy as np
import processes
import pytest
import support

import optperm

WORKER = pathlib.Path(__file__).with_name("svrg_worker.py")


@pytest.fixture
def worker():
    """The worker's module, for the model and the data that it trains."""
    spec = importlib.util.spec_from_file_location("svrg_worker", WORKER)
    module = importlib.util.module_from_spec(spec)
    with jax.enable_x64(True):
        spec.loader.exec_module(module)
        yield module


def train_alone(worker):
    """The same training on one device."""
    params = worker.start()
    opt_state = worker.TX.init(params)
    for t in range(worker.STEPS):
        if t % 4 == 0:
            full_grad = optperm.full_gradient(worker.loss_fn, params, [worker.make_data()])
            opt_state = optperm.take_snapshot(opt_state, params, full_grad)
        parts = [worker.step_batch(index, t) for index in range(2)]
        batch = {k: np.concatenate([part[k] for part in parts]) for k in parts[0]}
        params, opt_state = worker.step(params, opt_state, batch)
    return params, full_grad


def test_two_processes_train_as_one(worker, tmp_path):
    """Two processes of two devices, with parts of unequal size: one device's numbers, to rounding."""
    processes.run_workers(WORKER, tmp_path, environment={"JAX_ENABLE_X64": "1"})
    first, second = (np.load(tmp_path / f"{index}.npz") for index in range(2))
    assert first["devices"] == 4
    support.assert_same_bits(dict(first), dict(second))
    params, full_grad = train_alone(worker)
    initial_grad = jax.grad(worker.loss_fn)(worker.start(), worker.make_data())
    for name in params:
        for kind, expected in [
            ("trained", params),
            ("full_grad", full_grad),
            ("pmap", initial_grad),
        ]:
            got = first[f"{kind}_{name}"]
            np.testing.assert_allclose(np.ravel(got), np.ravel(expected[name]), rtol=1e-12)
    assert np.abs(params["kernel"]).max() > 0.1
