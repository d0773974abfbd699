import functools

import jax
import numpy as np
import pytest

from optperm.cli.main import main

jax.devices()  # started here, with eight: a test of --devices does not decide how many there are


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient):
    """The command line runs optimizers of Optax, which do not keep to strict promotion."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three classes of 6 numbers; 64 examples to train on, which no batch of a test divides."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(164, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    path = tmp_path_factory.mktemp("data") / "three.npz"
    np.savez(path, x_train=x[:64], y_train=y[:64], x_test=x[64:], y_test=y[64:])
    return str(path)


@pytest.fixture(scope="module")
def train(tmp_path_factory, data):
    """Trains for three epochs, once for all tests that ask for the same, and returns the folder."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(method, *flags, devices=1, batch_size=5):
        out = folder / str(len(list(folder.iterdir())))
        numbers = {"devices": devices, "batch-size": batch_size, "epochs": 3, "hidden": 7}
        more = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        assert main(["train", method, *flags, *more, "--data", data, "--out", str(out)]) == 0
        return out

    return run
