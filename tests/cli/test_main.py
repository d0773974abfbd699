"""The command line as a user meets it: flags, error lines, files, Ctrl-C."""

import io
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import typing

import jax
import numpy as np
import pytest
import support
from cyclopts import Token

import optperm
from optperm.cli import commands, datasets, methods, models, run_folder, training
from optperm.cli.flags import Run
from optperm.cli.main import main

# Either kernel may be the one installed here; the slow one says so.
pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

FILES = {"curve.png", "metrics.jsonl", "steps.npz", "summary.json"}


def test_run_prints_and_writes_what_it_found(run, out, capsys):
    assert run(out, "adam", "--seed", "5", "--lr", "0.02", "--b1", "0.8", batch_size=15) == 0
    shown = capsys.readouterr().out.splitlines()
    assert out.names == FILES | {"params.npz"}
    assert (out.folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    summary, metrics = out.summary, out.metrics
    expected = {
        **{"method": "adam", "model": "mlp", "hidden": 7, "seed": 5, "batch_size": 15},
        **{"epochs": 3, "epochs_done": 3, "interrupted": False, "fraction_moved": None},
        **{"train_examples": 64, "classes": 3, "params": 6 * 7 + 7 + 7 * 3 + 3},
        "steps": 12,  # 64 examples hold four batches of 15; the rest is left out
    }
    assert {key: summary[key] for key in expected} == expected
    rates = {"learning_rate": 0.02, "b1": 0.8, "b2": 0.999, "eps": 1e-08}
    assert summary["hyperparameters"].items() >= rates.items()
    assert summary["versions"]["jax"] == jax.__version__
    assert [line["epoch"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[-1]["test_accuracy"] == summary["test_accuracy"]
    assert out.losses[-4:].mean() == pytest.approx(metrics[-1]["train_loss"])
    assert shown[0].startswith("three: 64 to train, 100 to test; shape 6, 3 classes, values from")
    assert [line.split()[:2] for line in shown[1:5]] == [["epoch", f"{i}/3"] for i in range(4)]
    assert f"test accuracy {summary['test_accuracy']:.4f}" in [" ".join(s.split()) for s in shown]
    assert shown[-1].startswith(f"Files in {out}: curve.png, metrics.jsonl, params.npz")


@pytest.mark.parametrize("method", methods.METHODS.values(), ids=lambda method: method.name)
def test_method_of_default_flags_is_made(method, data):
    found = training.Training(method, method.defaults(), Run(data=data), datasets.load(data))
    jax.eval_shape(found._tx.init, models.initial_params(found.spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["sgperm", "laperm", "svrg", "dldr", "constant-sgd", "diloco", "low-rank"],
)
def test_trained_network_is_rebuilt_bit_for_bit(train, evaluate, data, method):
    """From its seed and the permutation, or its params."""
    found = train(method)
    kept = "permutation.npz" if method in ("sgperm", "laperm") else "params.npz"
    assert found.names >= FILES | {kept}
    spec, trained = run_folder.rebuild(found.folder)
    untrained = models.initial_params(spec)
    if kept == "permutation.npz":
        support.assert_permutes(trained, untrained)
    assert run_folder.digest(trained) != run_folder.digest(untrained)
    assert found.losses[-12:].mean() < found.losses[:12].mean()
    evaluate(found)
    with np.load(data) as arrays:
        logits = models.build(spec).apply({"params": trained}, arrays["x_test"])
        correct = np.sum(np.argmax(logits, axis=-1) == arrays["y_test"])
    assert found.summary["test_accuracy"] == correct / 100


NETWORK = """
import flax.linen as nn

class Base(nn.Module):
    num_classes: int
    hidden: int

class Net(Base):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.num_classes)(nn.tanh(nn.Dense(self.hidden)(x)))

class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=True)(x))

class Narrow(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)
"""


@pytest.mark.programs
@pytest.mark.filterwarnings("default:In Dense_0/bias")
def test_network_of_ones_own_is_trained_and_rebuilt(
    run, out, evaluate, fails, tmp_path, monkeypatch, capsys
):
    """Fields of a base class are filled as well."""
    (tmp_path / "own_networks.py").write_text(NETWORK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    own = ["--model", "own_networks:Net", "--hidden", "11"]
    assert run(out, "adam", *own) == 0
    assert out.summary["params"] == 6 * 11 + 11 + 11 * 3 + 3
    evaluate(out)
    wanted = "or a module:Class whose only variables are params"
    for name, says in [
        ("own_networks:Normed", f"{wanted} (ScopeCollectionNotFound: Tried to access"),
        ("own_networks:Narrow", "must map a batch to (batch, 3) logits, got [1, 2]"),
        ("own_networks:Nothing", "AttributeError: module 'own_networks' has no attribute"),
        ("no_such_module:Net", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("json:loads", f"{wanted} (TypeError: loads() missing"),
    ]:
        fails(2, says, run, tmp_path / "other", "adam", "--model", name)
    # Biases that are all zero cannot be permuted, which is said.
    assert run(tmp_path / "permuted", "sgperm", *own, "--epochs", "1") == 0
    assert "Dense_0/bias, Dense_1/bias, all weights" in capsys.readouterr().err


def test_validation_examples_leave_the_test_for_the_end(run, out):
    """They come out of the training examples."""
    assert run(out, "sgd", "--valid-fraction", "0.25", "--epochs", "1") == 0
    summary, metrics = out.summary, out.metrics
    assert all(line["test_accuracy"] is None for line in metrics)
    assert [line["valid_accuracy"] * 16 % 1 for line in metrics] == [0] * 2
    assert summary["valid_accuracy"] == metrics[-1]["valid_accuracy"]
    assert summary["train_examples"] == 48
    assert summary["test_accuracy"] * 100 % 1 == pytest.approx(0, abs=1e-9)


def test_compiled_programs_are_kept_in_the_cache_folder_of_the_user(tmp_path, monkeypatch):
    set_to = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    training.keep_programs()
    assert set_to == {}  # another folder is set
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    training.keep_programs()
    folder = tmp_path / "cache" / "optperm" / f"programs-jax-{jax.__version__}"
    assert set_to["jax_compilation_cache_dir"] == str(folder)
    assert folder.is_dir()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="not kept: .*cannot be written"):
        training.keep_programs()


@pytest.mark.slow
def test_laperm_between_synchronizations_tests_the_synchronized_params(train):
    """Each epoch is tested as a run that ended there."""
    whole, part = (train("laperm", "--every", "5", "--epochs", epochs) for epochs in ("3", "1"))
    assert part.summary["test_accuracy"] == whole.metrics[1]["test_accuracy"]


def test_phases_of_dldr_end_with_its_last_snapshot():
    """Snapshots are taken before the steps 3, 6, 9 and 12, counted from 0."""
    phase, options = methods.METHODS["dldr"].phase, {"every": 3, "num_snapshots": 4, "start": 3}
    taken = [0, 0, 1, 1, 2, 3, 3]
    wanted = [*(f"snapshots {number}/4" for number in taken), "subspace"]
    assert [phase(step, **options) for step in range(0, 15, 2)] == wanted


def test_evaluation_of_changed_data_or_a_changed_network_is_refused(
    train, data, out, tmp_path, evaluate, fails
):
    shutil.copytree(train("sgperm").folder, out.folder)
    path, other, summary = out.folder / "permutation.npz", tmp_path / "other.npz", out.summary
    with np.load(data) as file:
        np.savez(other, **dict(file) | {"y_test": (file["y_test"] + 1) % 3})
    (out.folder / "summary.json").write_text(json.dumps(summary | {"data": str(other)}))
    again = ["evaluate", str(out)]
    fails(1, "the data have changed", main, again)
    evaluate(out, "--data", data)
    says = "examples of shape [8, 8], but the network takes [6]"
    fails(1, says, main, [*again, "--data", "digits"])
    with np.load(path) as file:
        arrays = dict(file)
    for changed, says in [
        ({"seed": np.array(1)}, "gives other weights here"),
        ({"digest": None}, "is damaged or was not written by optperm"),
        ({"params/Dense_0/kernel": np.zeros((6, 7))}, "is damaged or was not written by optperm"),
    ]:
        held = {name: array for name, array in (arrays | changed).items() if array is not None}
        np.savez(path, **held)
        fails(1, says, main, again)
    path.unlink()
    fails(1, "contains no trained network", main, again)


def test_results_are_never_overwritten(train, run, tmp_path, monkeypatch, fails):
    """Another run takes the first free name just before this one makes its folder."""
    full = train("sgd").folder
    before = {path: path.read_bytes() for path in full.iterdir()}
    fails(2, "exists and is not an empty folder", run, full, "sgd")
    assert before == {path: path.read_bytes() for path in full.iterdir()}
    monkeypatch.chdir(tmp_path)
    make, taken = pathlib.Path.mkdir, []

    def mkdir(path, *args, **options):
        if not taken:
            taken.append(path)
            make(path, *args, **options)
        make(path, *args, **options)

    monkeypatch.setattr(pathlib.Path, "mkdir", mkdir)
    names = [str(run_folder.create(None, "sgd")) for _ in range(2)]
    assert (taken, names) == ([pathlib.Path("runs/sgd")], ["runs/sgd-2", "runs/sgd-3"])


def test_run_that_diverges_fails_and_says_where(run, out, capsys):
    assert run(out, "sgd", "--learning-rate", "1e30") == 1
    bad = np.flatnonzero(~np.isfinite(out.losses))
    assert 0 < bad[0] < 11
    said, err = capsys.readouterr()
    assert f"the loss stopped being finite at step {bad[0] + 1} of 36" in err
    assert err.count("\n") == 1
    assert "test accuracy" not in said  # that of a success
    assert out.summary["train_loss"] is None
    assert out.names == FILES | {"params.npz"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("adam --epochs 0", '"0" for --epochs. Must be >= 1. (see optperm train adam --help)'),
        ("adam --epochs 2.5", "invalid literal for int() with base 10: '2.5'"),
        ("adam --seed 4294967296", "--seed. Must be <= 4294967295"),
        ("adam --learning-rate inf", "--learning-rate. Must be a finite number"),
        ("adam --learning-rate fast", 'unable to convert "fast" into float'),
        ("adam --momentum 0.9", "--momentum. (see optperm train adam --help)"),
        ("agn --combine median", 'Choose from: "mean", "sum", "sequential"'),
        ("sgd --valid-fraction 1", "--valid-fraction. Must be < 1"),
        (
            "sgd --valid-fraction 0.001",
            "--valid-fraction 0.001 leaves no examples for training or none for validation, out of 64",
        ),
        ("adam --batch-size 65", "is 65 examples per step, more than the 64 training examples"),
        ("adam --model gpt", "must be mlp, cnn, or a module:Class whose only variables are params"),
        ("adam --model cnn", "--model cnn needs images"),
        ("adam --b1 1.5", "adam: b1 must be in [0, 1], got 1.5"),
        ("sgd --learning-rate -1", "sgd: learning_rate must be at least 0, got -1.0"),
        ("svrg --every 0", "every must be at least 1"),
        ("dldr --num-snapshots 4 --n-components 4", "needs num_snapshots of at least 5"),
        ("dldr --second adam", 'Choose from: "dim_reduce", "project", "twa"'),
        ("low-rank --rank 1.0", "rank must be"),
        ("low-rank --rank many", "Invalid value"),
    ],
)
def test_bad_flag_ends_with_one_line(run, flags, says, out, fails):
    fails(2, says, run, out, *flags.split())
    assert not out.folder.exists()


def test_unknown_method_unusable_folder_or_missing_device_ends_with_one_line(run, data, out, fails):
    fails(2, "(see optperm train --help)", main, ["train", "lion"])
    fails(1, f"cannot write to {data}", run, f"{data}/below a file", "sgd")
    fails(1, "devices must be at most 8", run, out, "sgd", "--devices", "9")


def test_missing_extra_ends_with_what_to_install(monkeypatch, fails):
    for extra in ("matplotlib", "cyclopts"):
        monkeypatch.setitem(sys.modules, extra, None)
        fails(1, "pip install 'optperm[cli]'", main, ["train", "adam"])


def test_help_is_shown_without_a_command(capsys):
    for argv in ([], ["train"]):
        assert main(argv) == 2
        assert "Usage: optperm" in capsys.readouterr().out


@pytest.mark.parametrize("method", methods.METHODS.values(), ids=lambda method: method.name)
def test_help_of_a_method_shows_its_flags_first_and_an_example_that_runs(method, capsys):
    """The help has no markup, names no value that a flag cannot take, and no symbol by itself."""
    assert main(["train", method.name, "--help"]) == 0
    shown = capsys.readouterr().out
    places = [shown.index(title) for title in (f"What {method.name} takes", "Data and model")]
    assert shown.index("Example: ") < places[0] < places[1]
    for name, flag in method.flags.items():
        assert shown.index(f"--{name.replace('_', '-')}", places[0]) < places[1], name
        # None where the method chooses by itself; the flag then says what may be given.
        of = typing.get_args(flag.kind) if flag.default is None else (type(flag.default),)
        assert {*of} & {bool, int, float, str}, name
        assert len(flag.help) > 5, name
        assert not re.findall(r"[`\\:]|schedule|None|optperm|\b[B-Z]\b", flag.help), name
    (example,) = re.findall(rf"Example: optperm (train {method.name} .*)", shown)
    commands._App.parse_args(shlex.split(example), exit_on_error=False, print_error=False)


def test_rank_one_and_the_fraction_one_are_told_apart():
    """`--rank 1` is a rank, `--rank 0.5` a fraction; the fraction 1.0 is refused above."""
    read = methods._RANK.kind.__metadata__[0].converter
    ranks = [read(float, [Token(value=text)]) for text in ("1", "0.5", "1.0")]
    assert [(type(rank), rank) for rank in ranks] == [(int, 1), (float, 0.5), (float, 1.0)]


def test_gradient_evaluations_count_the_full_gradient_of_an_unfinished_epoch(data):
    """It is of 64 examples, before each odd epoch of 12 steps; a step takes 2 gradients of 5 each."""
    method, flags = methods.METHODS["svrg"], Run(data=data, batch_size=5)
    for hyperparameters, gradients, snapshots in [
        (method.defaults(), 2, ((0, 0), (1, 1), (12, 1), (13, 1), (24, 1), (25, 2))),
        (method.defaults() | {"coefficient": 0.0}, 1, ((36, 2),)),
    ]:
        run = training.Training(method, hyperparameters, flags, datasets.load(data))
        for step, full in snapshots:
            assert run.gradient_evaluations(step) == gradients * 5 * step + 64 * full


def test_what_the_run_knows_reaches_the_methods_that_ask_for_it():
    given = {}

    def build(rate=0.5, *, num_data, key, axis_name=None):
        given.update(rate=rate, num_data=num_data, key=key, axis_name=axis_name)
        return optperm.svrg()

    method = methods.Method("probe", build, (), {"rate": methods.Flag(0.5, "A rate.")})
    facts = {"num_data": 7, "key": 3, "batch_size": 5, "axis_name": "replica"}
    method.transformation({"rate": 0.25}, **facts)
    assert given == {"rate": 0.25, "num_data": 7, "key": 3, "axis_name": "replica"}


def test_sigterm_saves_what_was_learned(run, out, evaluate, signal_after, capsys):
    signal_after(signal.SIGTERM, 2)
    assert run(out, "sgd", "--epochs", "5") == 143
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "Stopped. --checkpoint-every makes a run resumable."
    assert (out.summary["interrupted"], out.summary["epochs_done"]) == (True, 2)
    assert out.names == FILES | {"params.npz"}
    evaluate(out)


DLDR = "dldr", "--every", "1", "--num-snapshots", "6", "--n-components", "5"


@pytest.mark.slow
def test_replicas_take_the_steps_of_one_with_a_larger_batch(train, evaluate):
    """Each of four replicas of dldr holds two of the five rows of the basis, or one, or none."""
    on_four, alone = train(*DLDR, devices=4), train(*DLDR, batch_size=20)
    assert len(on_four.losses) == 9  # of 64 examples 60 are dealt out, 20 a step
    np.testing.assert_allclose(on_four.losses, alone.losses, rtol=1e-4)
    support.assert_close(on_four.trained, alone.trained, rtol=1e-4, atol=1e-5)
    for key in ("steps", "phase", "gradient_evaluations"):
        assert on_four.summary[key] == alone.summary[key]
    evaluate(on_four)


@pytest.mark.programs
@pytest.mark.filterwarnings("default:The run ends after:UserWarning")
def test_what_is_saved_and_tested_is_the_center_with_all_steps(train, capsys):
    """Three steps an epoch: each epoch is tested as a run that ended there."""
    tested = [line["test_accuracy"] for line in train("agn", devices=4).metrics]
    one = train("agn", "--epochs", "1", devices=4)
    said = capsys.readouterr().err
    assert said.count("The run ends after 3 steps, before the first commit of agn or diloco") == 1
    assert one.summary["test_accuracy"] == tested[1]
    # The replicas part between commits, each on its own batches.
    alone = train("agn", "--epochs", "1", batch_size=20).losses
    np.testing.assert_allclose(one.losses[0], alone[0], rtol=1e-5)
    assert np.all(np.abs(one.losses[2:] / alone[2:] - 1) > 1e-4)


@pytest.mark.programs
def test_import_of_optperm_loads_neither_flax_nor_scipys_statistics():
    """Each of them takes about as long as JAX."""
    says = "import sys, optperm; print({'flax', 'scipy.stats', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", says], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


@pytest.mark.programs
@pytest.mark.parametrize("module", ["jax", "cyclopts"])
def test_ctrl_c_while_a_module_is_imported_leaves_no_traceback(module):
    """Early or late."""
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


def test_terminal_of_ascii_or_a_closed_pipe_loses_no_run(run, out, tmp_path, monkeypatch):
    """The latter as of `optperm train sgd | head -1`."""
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    assert run(tmp_path / "l\u00e4ufe", "sgd") == 0
    shown.flush()
    assert b"l\\xe4ufe" in shown.buffer.getvalue().splitlines()[-1]
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert run(out, "sgd") == 0
    assert out.names == FILES | {"params.npz"}
