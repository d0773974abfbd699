import functools
import json
import signal

import jax
import numpy as np
import pytest

from optperm.cli import report, run_folder
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
def run(data):
    """Runs `optperm train` for three epochs of 12 steps, and returns the exit code."""

    def call(out, method, *flags, devices=1, batch_size=5):
        numbers = {"devices": devices, "batch-size": batch_size, "epochs": 3, "hidden": 7}
        more = [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
        return main(["train", method, *more, "--data", data, "--out", str(out), *flags])

    return call


@pytest.fixture(scope="session")
def train(tmp_path_factory, run):
    """Trains once for all tests that ask for the same, and returns the files."""
    folder = tmp_path_factory.mktemp("runs")

    @functools.cache
    def train_once(method, *flags, **numbers):
        out = folder / str(len(list(folder.iterdir())))
        assert run(out, method, *flags, **numbers) == 0
        return Files(out)

    return train_once


class Files:
    """What a run folder holds."""

    def __init__(self, folder):
        self.folder = folder

    def __str__(self):
        return str(self.folder)

    def beside(self, name):
        return Files(self.folder.with_name(name))

    @property
    def names(self):
        return {path.name for path in self.folder.iterdir()}

    @property
    def checkpoints(self):
        """The steps of the checkpoints."""
        names = (path.name for path in (self.folder / "checkpoints").iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self):
        """The lines, without their seconds."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) | {"seconds": None} for line in lines]

    @property
    def losses(self):
        with np.load(self.folder / "steps.npz") as steps:
            return steps["loss"]

    @property
    def trained(self):
        return run_folder.rebuild(self.folder)[1]


@pytest.fixture
def out(tmp_path):
    """The files of a run that is to come."""
    return Files(tmp_path / "run")


@pytest.fixture
def evaluate(capsys):
    """Asserts that `optperm evaluate` finds the accuracy of a run's summary, and shows it alone."""

    def check(found, *flags):
        capsys.readouterr()
        assert main(["evaluate", str(found), *flags]) == 0
        shown = f"test accuracy {found.summary['test_accuracy']:.4f}\n"
        assert capsys.readouterr().out == shown

    return check


@pytest.fixture
def fails(capsys):
    """Asserts that a call ends with an exit code and one line alone, an error, which is returned."""

    def check(code, says, call, *arguments):
        capsys.readouterr()
        assert call(*arguments) == code
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("optperm: error: ")
        assert says in err
        return err

    return check


@pytest.fixture
def signal_after(monkeypatch):
    """Sends a signal once, as soon as an epoch is shown."""

    def send(number, epoch):
        show = report.Reporter.epoch

        def show_and_send(self, record):
            show(self, record)
            if record["epoch"] == epoch:
                monkeypatch.undo()
                signal.raise_signal(number)

        monkeypatch.setattr(report.Reporter, "epoch", show_and_send)

    return send
