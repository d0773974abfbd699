"""`optperm compare`: its table agrees with runs of `train`, and its files with its table."""

import csv
import functools
import json

import pytest

from optperm.cli import methods
from optperm.cli.main import main

FLAGS = ["--hidden", "7", "--epochs", "2", "--batch-size", "10", "--quiet"]


@pytest.fixture(scope="module")
def comparison(data, tmp_path_factory):
    """A function that compares, once for all tests."""

    @functools.cache
    def compare():
        out = tmp_path_factory.mktemp("compare") / "out"
        flags = ["--data", data, "--seeds", "2", "--seed", "3", *FLAGS]
        assert main(["compare", "sgperm", "svrg", "agn", "sgperm", *flags, "--out", str(out)]) == 0
        return out

    return compare


@pytest.fixture
def folder(comparison):
    return comparison()


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_method_is_trained_once_from_each_seed(folder):
    assert {path.name for path in folder.iterdir()} == {
        "compare.csv",
        "compare.md",
        "compare.png",
        "metrics.jsonl",
    }
    runs = [(line["method"], line["seed"]) for line in lines(folder)]
    assert runs == [(method, seed) for method in ("sgperm", "svrg", "agn") for seed in (3, 4)]


@pytest.mark.parametrize("method", ["sgperm", "svrg"])
def test_its_figures_are_those_of_train(folder, data, tmp_path, method):
    out = tmp_path / "run"
    main(["train", method, "--data", data, "--seed", "4", *FLAGS, "--out", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    (line,) = [line for line in lines(folder) if (line["method"], line["seed"]) == (method, 4)]
    assert line["test_accuracy"][-1] == summary["test_accuracy"]
    assert line["train_loss"][-1] == pytest.approx(summary["train_loss"])
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


def test_an_unknown_method_is_named(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "sgd", "adamax"])
    assert f"must be one of {', '.join(methods.METHODS)}, got 'adamax'" in capsys.readouterr().err


def test_a_batch_of_more_than_all_examples_is_refused(data, capsys):
    flags = ["--data", data, "--batch-size", "40", "--devices", "2"]
    assert main(["compare", "sgd", *flags]) == 2
    assert "--batch-size 40 on each of 2 devices is more than the 64" in capsys.readouterr().err
