"""`optperm compare`: its table agrees with runs of `train`, and its files with its table."""

import csv

import jax
import pytest

from optperm.cli import methods
from optperm.cli.main import main

pytestmark = pytest.mark.chains

FLAGS = ["--hidden", "7", "--epochs", "2", "--batch-size", "10", "--quiet"]
FILES = {"compare.csv", "compare.md", "compare.png", "metrics.jsonl"}


@pytest.fixture(scope="module")
def folder(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    flags = ["--data", data, "--seeds", "2", "--seed", "3", *FLAGS]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert main(["compare", "sgperm", "svrg", "agn", *flags, "--out", str(out)]) == 0
    return out


def test_each_method_is_trained_once_from_each_seed(folder, files):
    assert files(folder).names == FILES
    runs = [(line["method"], line["seed"]) for line in files(folder).metrics]
    assert runs == [(method, seed) for method in ("sgperm", "svrg", "agn") for seed in (3, 4)]


@pytest.mark.parametrize("method", ["sgperm", "svrg"])
def test_its_figures_are_those_of_train(folder, files, data, tmp_path, method):
    out = tmp_path / "run"
    main(["train", method, "--data", data, "--seed", "4", *FLAGS, "--out", str(out)])
    summary = files(out).summary
    (line,) = [
        line for line in files(folder).metrics if (line["method"], line["seed"]) == (method, 4)
    ]
    assert line["test_accuracy"][-1] == summary["test_accuracy"]
    assert line["train_loss"][-1] == summary["train_loss"]
    assert line["gradient_evaluations"] == summary["gradient_evaluations"]
    # Twelve steps of ten; svrg takes two gradients each, and one of all 64 examples.
    assert line["gradient_evaluations"] == {"sgperm": 120, "svrg": 304}[method]
    # 73 params three times, 4 bytes each, and some numbers: weights, momentum and ranks; or momentum, a
    # snapshot and its gradient.
    assert 0 < line["state_bytes"] - 3 * 4 * 73 < 40
    assert line["seconds_a_step"] > 0


def test_table_and_csv_agree(folder):
    with (folder / "compare.csv").open() as file:
        epochs = list(csv.DictReader(file))
    assert len(epochs) == 3 * 2 * 3
    about, _, header, _, *rows = (folder / "compare.md").read_text().splitlines()
    assert "2 epochs, batches of 10" in about
    assert header == "| method | test accuracy | ms a step | optimizer state | gradients |"
    for row, method in zip(rows, ("sgperm", "svrg", "agn"), strict=True):
        name, accuracy, *_ = row.strip("| ").split(" | ")
        assert name == method
        last = [
            float(line["test_accuracy"])
            for line in epochs
            if line["method"] == method and line["epoch"] == "2"
        ]
        assert float(accuracy.split(" ± ")[0]) == pytest.approx(sum(last) / 2, abs=1e-4)
    assert (folder / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_compared_is_refused(data, error_line):
    assert main(["compare", "sgd", "adamax"]) == 2
    says = error_line()
    assert all(name in says for name in methods.METHODS)
    assert main(["compare", "adam", "sgd", "adam"]) == 2
    assert "adam is named more than once" in error_line()
    flags = ["--data", data, "--batch-size", "40", "--devices", "2"]
    assert main(["compare", "sgd", *flags]) == 2
    assert "--batch-size 40 on each of 2 devices is more than the 64" in error_line()
