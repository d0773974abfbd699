import functools
import json
import os
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from optperm.cli import run_folder
from optperm.cli.main import main

jax.devices()  # started here, with eight: a test of --devices does not decide how many there are


@pytest.fixture(autouse=True)
def _as_users_run_it(lenient):
    """The command line runs optimizers of Optax, which do not keep to strict promotion."""


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Three classes of 6 numbers; 64 examples to train on, which no batch of a test divides."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(164, 6)).astype(np.float32)
    y = np.argmax(x[:, :3], axis=1)
    path = tmp_path_factory.mktemp("data") / "three.npz"
    np.savez(path, x_train=x[:64], y_train=y[:64], x_test=x[64:], y_test=y[64:])
    return str(path)


@pytest.fixture(scope="session")
def train(tmp_path_factory, data):
    """Trains for three epochs, once for all tests that ask for the same, and returns the folder."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def run(method, *flags, devices=1, batch_size=5):
        out = folder / str(len(list(folder.iterdir())))
        numbers = {"devices": devices, "batch-size": batch_size, "epochs": 3, "hidden": 7}
        more = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            assert main(["train", method, *more, "--data", data, *flags, "--out", str(out)]) == 0
        return out

    return run


class Files:
    """What a run folder holds."""

    def __init__(self, folder):
        self.folder = folder

    @property
    def names(self):
        return {path.name for path in self.folder.iterdir()}

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    @property
    def losses(self):
        with np.load(self.folder / "steps.npz") as steps:
            return steps["loss"]

    @property
    def trained(self):
        return run_folder.rebuild(self.folder)[1]


@pytest.fixture(scope="session")
def files():
    return Files


@pytest.fixture
def error_line(capsys):
    """The one line that the program has written, an error."""

    def line():
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("optperm: error: ")
        assert err.count("\n") == 1
        return err

    return line


def spawned(command, *flags, **environment):
    """A process of its own, `optperm COMMAND ...`."""
    return subprocess.Popen(
        [sys.executable, "-m", "optperm.cli.main", command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


@pytest.fixture
def start():
    """Starts processes, which no test leaves behind."""
    started = []

    def begin(*arguments, **environment):
        started.append(spawned(*arguments, **environment))
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def wait_for_epochs():
    """Waits until a run that a process has started has written so many epochs."""

    def wait(folder, process, count):
        metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 300
        while not (metrics.exists() and metrics.read_text().count("\n") > count):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return wait
