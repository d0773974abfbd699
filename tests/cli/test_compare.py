"""`optperm compare`: its table agrees with runs of `train`, and its files with its table."""

import csv
import json

import pytest

from optperm.cli import methods
from optperm.cli.main import main

FLAGS = ["--hidden", "7", "--epochs", "2", "--batch-size", "10", "--quiet"]


@pytest.fixture(scope="module")
def folder(small_npz, tmp_path_factory):
    out = tmp_path_factory.mktemp("compare") / "out"
    flags = ["--data", str(small_npz), "--seeds", "2", "--seed", "3", *FLAGS]
    assert main(["compare", "sgperm", "svrg", "agn", "sgperm", *flags, "--out", str(out)]) == 0
    return out


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
def test_its_figures_are_those_of_train(folder, small_npz, tmp_path, method):
    out = tmp_path / "run"
    main(["train", method, "--data", str(small_npz), "--seed", "4", *FLAGS, "--out", str(out)])
    summary = json.loads((out / "summary.json").read_text())
    (line,) = [line for line in lines(folder) if (line["method"], line["seed"]) == (method, 4)]
    assert line["test_accuracy"][-1] == summary["test_accuracy"]
    assert line["train_loss"][-1] == pytest.approx(summary["train_loss"])
    assert line["gradient_evaluations"] == summary["gradient_evaluations"]
    # 40 examples: eight steps of ten; svrg takes two gradients each, and one of all examples.
    assert line["gradient_evaluations"] == {"sgperm": 80, "svrg": 200}[method]
    # Weights, momentum and ranks of 65 params; or a snapshot and its gradient; in float32 and int32.
    assert line["state_bytes"] == pytest.approx({"sgperm": 780, "svrg": 520}[method], abs=40)
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
    assert main(["compare", "sgd", "adamax"]) == 2
    assert f"must be one of {', '.join(methods.METHODS)}, got 'adamax'" in capsys.readouterr().err


def test_a_batch_of_more_than_all_examples_is_refused(small_npz, capsys):
    flags = ["--data", str(small_npz), "--batch-size", "30", "--devices", "2"]
    assert main(["compare", "sgd", *flags]) == 2
    assert "--batch-size 30 on 2 devices is more than the 40" in capsys.readouterr().err
