"""The command line as a user meets it: flags, error lines, files, Ctrl-C."""

import contextlib
import io
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
import types
import typing

import jax
import numpy as np
import pytest
import support
from cyclopts import Token

import optperm
from optperm.cli import commands, methods, models, report, run_folder, training
from optperm.cli.main import main

# Either kernel may be the one installed here; the slow one says so.
pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

FILES = {"curve.png", "metrics.jsonl", "steps.npz", "summary.json"}


@pytest.fixture
def flags(data, tmp_path):
    """Those of a small run."""
    return ["--data", data, "--hidden", "7", "--batch-size", "10", "--out", str(tmp_path / "run")]


def test_a_run_on_the_digits_learns_and_says_so(tmp_path, files, capsys):
    out = tmp_path / "run"
    assert main(["train", "sgd", "--epochs", "2", "--hidden", "32", "--out", str(out)]) == 0
    summary, shown = files(out).summary, capsys.readouterr().out.splitlines()
    assert summary["test_accuracy"] > 0.9
    assert files(out).names == FILES | {"params.npz"}
    says = (
        "digits: 1,257 to train, 540 to test; shape 8 x 8, 10 classes, values from -3.006 to 35.44"
    )
    assert shown[0] == says
    assert [line.split()[:2] for line in shown[1:4]] == [["epoch", f"{i}/2"] for i in range(3)]
    assert f"test accuracy {summary['test_accuracy']:.4f}" in [" ".join(s.split()) for s in shown]
    assert shown[-1].startswith(f"Files in {out}: curve.png, metrics.jsonl, params.npz")


@pytest.mark.chains
def test_cnn_learns_digits(tmp_path, files):
    flags = ["--model", "cnn", "--hidden", "16", "--epochs", "2", "--quiet", "--batch-size", "20"]
    flags += ["--learning-rate", "0.01", "--out", str(tmp_path / "run")]
    assert main(["train", "adam", *flags]) == 0
    assert files(tmp_path / "run").summary["test_accuracy"] > 0.7


@pytest.mark.parametrize(
    "method",
    [
        name if name in ("sgperm", "adam") else pytest.param(name, marks=pytest.mark.chains)
        for name in methods.METHODS
    ],
)
def test_every_method_trains_and_is_rebuilt(train, files, data, method, capsys):
    """Bit for bit: from its seed and the permutation, or its params."""
    out = train(method)
    kept = "permutation.npz" if method in ("sgperm", "laperm") else "params.npz"
    assert files(out).names >= FILES | {kept}
    untrained = models.initial_params(run_folder.rebuild(out)[0])
    trained = files(out).trained
    if kept == "permutation.npz":
        support.assert_permutes(trained, untrained)
    assert run_folder.digest(trained) != run_folder.digest(untrained)
    assert files(out).losses[-12:].mean() < files(out).losses[:12].mean()
    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    assert capsys.readouterr().out == f"test accuracy {files(out).summary['test_accuracy']:.4f}\n"
    with np.load(data) as arrays:
        model = models.build(run_folder.rebuild(out)[0])
        logits = model.apply({"params": trained}, arrays["x_test"])
        correct = np.sum(np.argmax(logits, axis=-1) == arrays["y_test"])
    assert files(out).summary["test_accuracy"] == correct / 100


def test_summary_tells_all_flags_and_agrees_with_the_metrics(flags, files, tmp_path):
    more = ["--seed", "5", "--epochs", "3", "--batch-size", "15", "--b1", "0.8", "--quiet"]
    assert main(["train", "adam", *flags, *more]) == 0
    found = files(tmp_path / "run")
    summary, metrics = found.summary, found.metrics
    expected = {
        **{"method": "adam", "model": "mlp", "hidden": 7, "seed": 5, "batch_size": 15},
        **{"epochs": 3, "epochs_done": 3, "interrupted": False, "fraction_moved": None},
        "steps": 12,  # 64 examples hold four batches of 15; the rest is left out
        "params": 6 * 7 + 7 + 7 * 3 + 3,
    }
    assert {key: summary[key] for key in expected} == expected
    rates = {"learning_rate": 0.001, "b1": 0.8, "b2": 0.999, "eps": 1e-08}
    assert summary["hyperparameters"].items() >= rates.items()
    assert summary["versions"]["jax"] == jax.__version__
    assert [line["epoch"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[-1]["test_accuracy"] == summary["test_accuracy"]
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in metrics))
    assert summary["train_examples"], summary["classes"] == (64, 3)
    assert found.losses.shape == (12,)
    assert found.losses[-4:].mean() == pytest.approx(metrics[-1]["train_loss"])
    assert (tmp_path / "run/curve.png").read_bytes().startswith(b"\x89PNG")


NETWORK = """
import flax.linen as nn

class Net(nn.Module):
    num_classes: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.tanh(nn.Dense(9)(x.reshape(len(x), -1))))

class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))

class Base(nn.Module):
    num_classes: int
    hidden: int

class Derived(Base):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.tanh(nn.Dense(self.hidden)(x)))

class Dropping(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))

class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)
"""


@pytest.mark.programs
@pytest.mark.filterwarnings("default:In Dense_0/bias")
def test_a_network_of_ones_own_is_trained_and_rebuilt(
    flags, files, tmp_path, monkeypatch, error_line, capsys
):
    (tmp_path / "own_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert main(["train", "adam", *flags, "--model", "own_networks:Net", "--lr", "0.05"]) == 0
    summary = files(tmp_path / "run").summary
    assert (summary["params"], summary["model"]) == (6 * 9 + 9 + 9 * 3 + 3, "own_networks:Net")
    assert summary["test_accuracy"] > 0.6
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary['test_accuracy']:.4f}\n"
    flags[flags.index("--out") + 1] = str(tmp_path / "other")
    for name, says in [
        ("own_networks:Normed", "of params alone (ScopeCollectionNotFound: Tried to access"),
        ("own_networks:Dropping", "of params alone (InvalidRngError: Dropout_0 needs PRNG"),
        ("own_networks:Narrow", "must map a batch to (batch, 3) logits, got [1, 2]"),
        ("own_networks:Nothing", "AttributeError: module 'own_networks' has no attribute"),
        ("no_such_module:Net", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:loads", "nor a module:Class of params alone (TypeError: loads() missing"),
    ]:
        assert main(["train", "adam", *flags, "--model", name]) == 2
        assert says in error_line()
    # Fields of a base class are filled as well.
    derived = ["--model", "own_networks:Derived", "--hidden", "11", "--epochs", "1", "--quiet"]
    assert main(["train", "adam", *flags, *derived]) == 0
    assert files(tmp_path / "other").summary["params"] == 6 * 11 + 11 + 11 * 3 + 3
    flags[flags.index("--out") + 1] = str(tmp_path / "permuted")
    # Biases that are all zero cannot be permuted, which is said.
    flags += ["--model", "own_networks:Net", "--epochs", "1"]
    assert main(["train", "sgperm", *flags]) == 0
    assert "Dense_0/bias, Dense_1/bias all weights" in capsys.readouterr().err


def test_validation_examples_leave_the_test_for_the_end(flags, files, tmp_path):
    """They come out of the training examples."""
    assert main(["train", "adam", *flags, "--valid-fraction", "0.25", "--epochs", "2"]) == 0
    found = files(tmp_path / "run")
    assert all(line["test_accuracy"] is None for line in found.metrics)
    assert [line["valid_accuracy"] * 16 % 1 for line in found.metrics] == [0] * 3
    assert found.summary["valid_accuracy"] == found.metrics[-1]["valid_accuracy"]
    assert found.summary["train_examples"] == 48
    assert found.summary["test_accuracy"] * 100 % 1 == pytest.approx(0, abs=1e-9)


def test_lr_is_short_for_the_learning_rate(flags, files, tmp_path):
    assert main(["train", "adam", *flags, "--lr", "0.25", "--epochs", "1"]) == 0
    assert files(tmp_path / "run").summary["hyperparameters"]["learning_rate"] == 0.25


def test_compiled_programs_are_kept_in_the_cache_folder_of_the_user(tmp_path, monkeypatch, recwarn):
    set_to, current = {}, jax.config.jax_compilation_cache_dir
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    training.keep_programs()
    assert set_to == {}  # another folder is set
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    training.keep_programs()
    folder = tmp_path / "cache" / "optperm" / f"programs-jax-{jax.__version__}"
    assert set_to["jax_compilation_cache_dir"] == str(folder)
    assert folder.is_dir()
    set_to.clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept: .*cannot be written"):
        training.keep_programs()
    assert set_to == {}
    assert current


def test_the_curve_has_steps_epochs_and_tests(tmp_path, monkeypatch):
    drawn, picture = [], report.picture

    @contextlib.contextmanager
    def kept(*args, **options):
        with picture(*args, **options) as figure:
            yield drawn.append(figure) or figure

    monkeypatch.setattr(report, "picture", kept)
    names = ("step", "train_loss", "train_accuracy", "valid_accuracy", "test_accuracy")
    rows = [(0, None, None, None, 0.1), (2, 3.0, 0.5, None, 0.4), (4, 1.0, 0.75, None, 0.7)]
    records = [dict(zip(names, row, strict=True)) for row in rows]
    steps = {"loss": np.float32([4, 2, 1.5, 0.5]), "accuracy": np.float32([0, 1, 0.5, 1])}
    report.draw_curve(tmp_path / "curve.png", records, steps)
    report.draw_curve(tmp_path / "empty.png", records[:1], {})
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    lines = {
        (axes.get_ylabel(), line.get_label()): line.get_xydata().tolist()
        for axes in drawn[0].axes
        for line in axes.get_lines()
    }
    assert lines["loss", "steps"] == [[1, 4], [2, 2], [3, 1.5], [4, 0.5]]
    assert lines["loss", "train loss"] == [[2, 3], [4, 1]]
    assert lines["accuracy", "test accuracy"] == [[2, 0.4], [4, 0.7]]
    assert len(lines) == 5


@pytest.mark.chains
def test_laperm_tests_what_is_synchronized(flags, files, tmp_path):
    """No epoch ends with a synchronization: each is tested as a run that ended there."""
    flags += ["--learning-rate", "0.05", "--every", "5", "--quiet"]
    assert main(["train", "laperm", *flags, "--epochs", "2"]) == 0
    assert files(tmp_path / "run").summary["steps"] == 12
    flags[flags.index("--out") + 1] = str(tmp_path / "part")
    assert main(["train", "laperm", *flags, "--epochs", "1"]) == 0
    ended = files(tmp_path / "part").summary["test_accuracy"]
    assert ended == files(tmp_path / "run").metrics[1]["test_accuracy"]


def test_evaluate_notices_what_was_changed(flags, data, files, tmp_path, error_line, capsys):
    out = tmp_path / "run"
    assert main(["train", "sgperm", *flags, "--epochs", "1", "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")  # so quiet it is
    with np.load(data) as file:
        arrays = dict(file)
    other = tmp_path / "other.npz"
    np.savez(other, **arrays | {"y_test": (arrays["y_test"] + 1) % 3})
    summary = files(out).summary
    (out / "summary.json").write_text(json.dumps(summary | {"data": str(other)}))
    assert main(["evaluate", str(out)]) == 1
    assert "the data have changed" in error_line()
    assert main(["evaluate", str(out), "--data", data]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary['test_accuracy']:.4f}\n"
    assert main(["evaluate", str(out), "--data", "digits"]) == 1
    assert "examples of shape [8, 8], but the network takes [6]" in error_line()
    path = out / "permutation.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {"seed": np.array(1)})
    assert main(["evaluate", str(out)]) == 1
    assert "gives other weights here" in error_line()
    name = next(name for name in arrays if name.startswith("params/"))
    without_digest = {name: leaf for name, leaf in arrays.items() if name != "digest"}
    no_permutation = arrays | {name: np.zeros_like(arrays[name])}
    for other in (without_digest, no_permutation):
        np.savez(path, **other)
        assert main(["evaluate", str(out)]) == 1
        assert "is damaged or was not written by optperm" in error_line()
    path.unlink()
    assert main(["evaluate", str(out)]) == 1
    assert "holds no trained network" in error_line()


@pytest.mark.chains
def test_the_phases_of_dldr_are_shown_and_kept(flags, files, tmp_path, capsys):
    recording = ["--start", "3", "--every", "3", "--num-snapshots", "4", "--n-components", "3"]
    flags += ["--batch-size", "30", "--epochs", "7", "--second", "project"]
    assert main(["train", "dldr", *flags, *recording]) == 0
    # Of two steps an epoch, snapshots are taken before the steps 3, 6, 9 and 12, counted from 0.
    taken = [0, 0, 1, 1, 2, 3, 3]
    phases = [*(f"snapshots {number}/4" for number in taken), "subspace"]
    found, shown = files(tmp_path / "run"), capsys.readouterr().out.splitlines()
    assert [line["phase"] for line in found.metrics] == phases
    assert found.summary["phase"] == "subspace"
    for epoch, phase in enumerate(phases, 1):
        assert shown[epoch].startswith(f"epoch {epoch - 1}/7 {phase} ")
    assert any(line.split() == ["phase", "subspace"] for line in shown)


def test_results_are_never_overwritten(flags, data, tmp_path, monkeypatch, error_line):
    monkeypatch.chdir(tmp_path)
    flags = [*flags[:-2], "--epochs", "1", "--quiet"]
    for _ in range(3):
        assert main(["train", "sgd", *flags]) == 0
    names = [f"sgd-mlp-three-s0{end}" for end in ("", "-2", "-3")]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == names
    first = tmp_path / "runs" / names[0]
    before = {path: path.read_bytes() for path in first.iterdir()}
    assert main(["train", "sgd", *flags, "--out", str(first)]) == 2
    assert "exists and is not an empty folder" in error_line()
    assert before == {path: path.read_bytes() for path in first.iterdir()}


def test_default_folders_of_runs_that_begin_together_differ(tmp_path, monkeypatch):
    """Another run takes the first free name just before this one makes its folder."""
    monkeypatch.chdir(tmp_path)
    make, taken = pathlib.Path.mkdir, []

    def mkdir(path, *args, **options):
        if not taken:
            taken.append(path)
            make(path, *args, **options)
        make(path, *args, **options)

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    folder = run_folder.create(None, "sgd")
    assert (taken, folder) == ([pathlib.Path("runs/sgd")], pathlib.Path("runs/sgd-2"))


def test_a_run_that_diverges_fails_and_says_where(flags, files, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "sgd", "--learning-rate", "1e30", *flags, "--epochs", "2"]) == 1
    bad = np.flatnonzero(~np.isfinite(files(out).losses))
    assert 0 < bad[0] < 11
    said, err = capsys.readouterr()
    assert f"the loss stopped being finite at step {bad[0] + 1} of 12" in err
    assert err.count("\n") == 1
    assert "Files in" not in said
    assert "test accuracy" not in said  # that of a success
    assert files(out).summary["train_loss"] is None
    assert files(out).names == FILES | {"params.npz"}


def test_bad_flags_end_with_one_line(tmp_path, data, error_line):
    cases = [
        ("adam --epochs 0", '"0" for --epochs. Must be >= 1. (see optperm train adam --help)'),
        ("adam --epochs many", "invalid literal for int() with base 10: 'many'"),
        ("adam --epochs 2.5", "invalid literal for int() with base 10: '2.5'"),
        ("adam --batch-size 0", "--batch-size. Must be >= 1"),
        ("adam --seed 4294967296", "--seed. Must be <= 4294967295"),
        ("adam --learning-rate inf", "--learning-rate. Must be a finite number"),
        ("adam --learning-rate fast", 'unable to convert "fast" into float'),
        ("adam --momentum 0.9", "--momentum. (see optperm train adam --help)"),
        ("adam --lear 0.9", "Unknown option: --lear"),
        ("adam --model gpt", "neither mlp nor cnn, nor a module:Class of params alone"),
        ("agn --combine median", 'Choose from: "mean", "sum", "sequential"'),
        ("lion", "(see optperm train --help)"),
        ("sgd --devices 0", "--devices. Must be >= 1"),
        ("sgd --valid-fraction 1", "--valid-fraction. Must be < 1"),
        (
            "sgd --valid-fraction 0.001",
            "--valid-fraction 0.001 of 64 training examples leaves none",
        ),
        ("adam --batch-size 65", "is 65 examples a step, more than the 64 to train"),
        ("adam --b1 1.5", "adam: b1 must be in [0, 1], got 1.5"),
        ("sgd --learning-rate -1", "sgd: learning_rate must be at least 0, got -1.0"),
        ("sgperm --partition-ratio 2", "sgperm: partition_ratio must be in [0, 1], got 2.0"),
        ("sgperm --min-partition-size 0", "min_partition_size must be at least 1, got 0"),
        ("svrg --every 0", "every must be at least 1"),
        ("agn --every 0", "every must be at least 1"),
        ("diloco --weight-decay -1", "diloco: weight_decay must be at least 0"),
        ("dldr --num-snapshots 4 --n-components 4", "needs num_snapshots of at least 5"),
        ("dldr --second adam", 'Choose from: "dim_reduce", "project", "twa"'),
        ("constant-sgd --estimator single_example", 'Choose from: "per_example", "two_batches"'),
        ("low-rank --rank 1.0", "rank must be"),
        ("low-rank --rank many", "Invalid value"),
        ("sgd --checkpoint-keep 0", "--checkpoint-keep. Must be >= 1"),
        ("adam --model cnn", "--model cnn needs images"),
        ("sgd --devices 7", "is 70 examples a step, more than the 64 to train"),
    ]
    common = ["--data", data, "--batch-size", "10", "--out", str(tmp_path / "run")]
    for flags, says in cases:
        method, *rest = flags.split()
        assert main(["train", method, *(common if rest else []), *rest]) == 2
        assert says in error_line()
        assert not (tmp_path / "run").exists()


def test_unusable_paths_end_with_one_line(data, tmp_path, error_line):
    assert main(["train", "adam", "--data", str(tmp_path / "nothing")]) == 1
    assert "there is no such file" in error_line()
    flags = ["--data", data, "--batch-size", "10"]
    assert main(["train", "adam", *flags, "--out", f"{data}/below a file"]) == 1
    assert f"cannot write to {data}" in error_line()
    (tmp_path / "text").write_text("x,y\n1,2\n")
    assert main(["train", "adam", "--data", str(tmp_path / "text")]) == 1
    assert "cannot be read as an .npz file" in (says := error_line())
    assert "allow_pickle" not in says
    assert main(["train", "sgd", *flags, "--devices", "9"]) in (1, 2)
    error_line()


def test_a_missing_extra_ends_with_what_to_install(monkeypatch, error_line):
    for extra in ("matplotlib", "cyclopts"):
        monkeypatch.setitem(sys.modules, extra, None)
        assert main(["train", "adam"]) == 1
        assert "pip install 'optperm[cli]'" in error_line()


def test_without_a_command_there_is_help(capsys):
    for argv in ([], ["train"]):
        assert main(argv) == 2
        assert "Usage: optperm" in capsys.readouterr().out


def test_the_help_of_a_method_shows_what_it_takes_first_and_an_example(capsys):
    for method in methods.METHODS.values():
        assert main(["train", method.name, "--help"]) == 0
        shown = capsys.readouterr().out
        titles = [f"What {method.name} takes", "Data and model"]
        places = [shown.index(title) for title in titles]
        assert places == sorted(places)
        assert shown.index("Example: ") < places[0]
        for name in method.flags:
            at = shown.index(f"--{name.replace('_', '-')}", places[0])
            assert at < places[1], name
        # The example is one that runs.
        (example,) = re.findall(rf"Example: optperm (train {method.name} .*)", shown)
        argv = shlex.split(example)
        commands._App.parse_args(argv, exit_on_error=False, print_error=False)
    assert main(["evaluate", "--help"]) == 0
    assert "Example: optperm evaluate " in capsys.readouterr().out


def test_every_flag_has_a_type_a_default_and_help():
    """The help has no markup, names no value that a flag cannot take, and no symbol by itself."""
    for method in methods.METHODS.values():
        for name, flag in method.flags.items():
            # None where the method chooses by itself; the flag then says what may be given.
            kinds = (bool, int, float, str)
            of = typing.get_args(flag.kind) if flag.default is None else (type(flag.default),)
            assert set(of) & set(kinds), (method.name, name)
            assert len(flag.help) > 5, (method.name, name)
            wrong = re.findall(r"[`\\:]|schedule|None|optperm|\b[B-Z]\b", flag.help)
            assert not wrong, (method.name, name, flag.help)


def test_rank_one_and_the_fraction_one_are_told_apart():
    """`--rank 1` is a rank, `--rank 0.5` a fraction; the fraction 1.0 is refused above."""
    read = methods._RANK.kind.__metadata__[0].converter
    ranks = [read(float, [Token(value=text)]) for text in ("1", "0.5", "1.0")]
    assert [(type(rank), rank) for rank in ranks] == [(int, 1), (float, 0.5), (float, 1.0)]


def test_gradient_evaluations_count_the_full_gradient_of_an_unfinished_epoch():
    """It is of 64 examples, in each odd epoch of 12 steps; a step takes 2 gradients of 5 examples."""
    run = types.SimpleNamespace(
        method=types.SimpleNamespace(gradients_a_step=lambda: 2),
        hyperparameters={},
        steps_per_epoch=12,
        batch_size=5,
        data=types.SimpleNamespace(x_train=range(64)),
        _change=lambda epoch: epoch if epoch % 2 else None,
    )
    for step, full in ((0, 0), (1, 1), (12, 1), (13, 1), (24, 1), (25, 2)):
        assert training.Training.gradient_evaluations(run, step) == 10 * step + 64 * full


def test_what_the_run_knows_reaches_the_methods_that_ask_for_it():
    given = {}

    def build(rate=0.5, *, num_data, key, axis_name=None):
        given.update(rate=rate, num_data=num_data, key=key, axis_name=axis_name)
        return optperm.svrg()

    method = methods.Method("probe", build, (), {"rate": methods.Flag(0.5, "A rate.")})
    facts = {"num_data": 7, "key": 3, "batch_size": 5, "axis_name": "replica"}
    method.transformation({"rate": 0.25}, **facts)
    assert given == {"rate": 0.25, "num_data": 7, "key": 3, "axis_name": "replica"}


@pytest.mark.programs
def test_sigterm_saves_what_was_learned(flags, tmp_path, files, capsys, start, wait_for_epochs):
    out = tmp_path / "run"
    process = start("train", "adam", *flags, "--epochs", "1000000")
    wait_for_epochs(out, process, 5)
    process.send_signal(signal.SIGTERM)
    said, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert said.splitlines()[-1] == "Stopped. --checkpoint-every makes a run resumable."
    summary = files(out).summary
    assert summary["interrupted"] is True
    assert summary["epochs_done"] == len(files(out).metrics) - 1
    assert files(out).names == FILES | {"params.npz"}
    assert main(["evaluate", str(out)]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary['test_accuracy']:.4f}\n"


@pytest.mark.programs
def test_a_second_ctrl_c_stops_at_once(tmp_path, start, wait_for_epochs):
    out = tmp_path / "run"
    # A call of a hundred steps takes longer than the test.
    data = tmp_path / "data.npz"
    x, y = np.zeros((16000, 900), np.uint8), np.arange(16000) % 2
    np.savez_compressed(data, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10] + 1)
    process = start(
        *("train", "sgd", "--data", str(data), "--hidden", "32768", "--batch-size", "160"),
        *("--epochs", "1", "--out", str(out)),
    )
    wait_for_epochs(out, process, 0)
    time.sleep(2.0)  # into the epoch: before it there is nothing to finish
    process.send_signal(signal.SIGINT)
    assert any("Stopping after this step" in line for line in iter(process.stderr.readline, ""))
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    # On a busy machine it may still be compiling, which nothing interrupts.
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err == "optperm: error: stopped by Ctrl-C.\n"
    assert not (out / "summary.json").exists()


@pytest.mark.programs
def test_importing_optperm_loads_neither_flax_nor_scipys_statistics():
    """Each of them takes about as long as JAX."""
    says = "import sys, optperm; print({'flax', 'scipy.stats', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.programs
@pytest.mark.parametrize("module", ["jax", "cyclopts"])
def test_ctrl_c_while_it_is_imported_leaves_no_traceback(module):
    """The signal comes when a module is about to be imported, early or late."""
    code = (
        "import signal, sys\n"
        "class Finder:\n"
        "    def find_spec(name, path=None, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder)\n"
        "from optperm_command import main\n"
        "sys.exit(main())"
    )
    command = [sys.executable, "-c", code, "train", "sgd"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in ended.stderr
    assert "stopped by Ctrl-C" in ended.stderr
    assert ended.returncode == 130


def test_a_terminal_that_shows_ascii_alone_loses_no_run(flags, tmp_path, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert main(["train", "sgd", *flags[:-1], str(tmp_path / "l\u00e4ufe")]) == 0
    shown.flush()
    assert b"l\\xe4ufe" in shown.buffer.getvalue().splitlines()[-1]


def test_a_closed_pipe_loses_no_run(flags, files, tmp_path, monkeypatch):
    """As of `optperm train sgd | head -1`."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert main(["train", "sgd", *flags]) == 0
    assert files(tmp_path / "run").names == FILES | {"params.npz"}
