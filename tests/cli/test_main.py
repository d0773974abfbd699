"""The command line as a user meets it: flags, error lines, files, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import support

import optperm
from optperm.cli import errors, methods, models, run_folder
from optperm.cli.main import main

# Either kernel may be the one installed here; the slow one says so.
pytestmark = pytest.mark.filterwarnings("ignore:optperm (runs|calls):RuntimeWarning")

FILES = {"curve.png", "metrics.jsonl", "steps.npz", "summary.json"}


def read_summary(folder):
    return json.loads((folder / "summary.json").read_text())


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def error_line(capsys):
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("optperm: error: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture
def small_npz(tmp_path):
    """Two classes that a line separates, 40 examples to train on and 2100 to test on."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2140, 6)).astype(np.float32)
    y = (x[:, 0] > 0).astype(np.int64)
    path = tmp_path / "small.npz"
    np.savez(path, x_train=x[:40], y_train=y[:40], x_test=x[40:], y_test=y[40:])
    return path


@pytest.mark.parametrize("method", ["adam", "sgd"])
def test_gradient_methods_learn_digits(tmp_path, method, capsys):
    out = tmp_path / "run"
    assert main(["train", method, "--epochs", "5", "--out", str(out)]) == 0
    summary = read_summary(out)
    assert summary["test_accuracy"] > 0.9
    assert {path.name for path in out.iterdir()} == FILES | {"params.npz"}
    assert f"{summary['test_accuracy']:.4f}" in capsys.readouterr().out


def test_cnn_learns_digits(tmp_path):
    out = tmp_path / "run"
    flags = ["--model", "cnn", "--hidden", "32", "--epochs", "6", "--quiet", "--out", str(out)]
    assert main(["train", "adam", "--learning-rate", "0.01", *flags]) == 0
    assert read_summary(out)["test_accuracy"] > 0.9


def test_summary_tells_all_flags_and_agrees_with_the_metrics(tmp_path, small_npz):
    out = tmp_path / "run"
    flags = ["--data", str(small_npz), "--hidden", "7", "--seed", "5", "--epochs", "3"]
    flags += ["--batch-size", "15", "--b1", "0.8", "--out", str(out), "--quiet"]
    assert main(["train", "adam", *flags]) == 0
    summary, metrics = read_summary(out), read_metrics(out)
    expected = {
        "method": "adam",
        "data": str(small_npz),
        "model": "mlp",
        "hidden": 7,
        "seed": 5,
        "epochs": 3,
        "epochs_done": 3,
        "batch_size": 15,
        "steps": 6,  # 40 examples hold two batches of 15; the rest is left out
        "params": 6 * 7 + 7 + 7 * 2 + 2,
        "interrupted": False,
        "share_moved": None,
        "hyperparameters": {"learning_rate": 0.001, "b1": 0.8, "b2": 0.999, "eps": 1e-08},
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["versions"]["jax"] == jax.__version__
    assert [line["epoch"] for line in metrics] == [0, 1, 2, 3]
    assert metrics[-1]["test_accuracy"] == summary["test_accuracy"]
    assert summary["seconds"] == pytest.approx(sum(line["seconds"] for line in metrics))
    assert summary["compile_seconds"] > 0
    with np.load(out / "steps.npz") as steps:
        assert steps["loss"].shape == (6,)
        assert steps["loss"][-2:].mean() == pytest.approx(metrics[-1]["train_loss"])
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")


def test_accuracy_of_a_test_set_of_several_chunks_is_exact(tmp_path, small_npz):
    out = tmp_path / "run"
    main(
        [
            "train",
            "sgd",
            "--data",
            str(small_npz),
            "--batch-size",
            "10",
            "--quiet",
            "--out",
            str(out),
        ]
    )
    spec, params = run_folder.rebuild(out)
    with np.load(small_npz) as data:
        logits = models.logits(models.build(spec), params, data["x_test"])
        correct = np.sum(np.argmax(logits, axis=-1) == data["y_test"])
    assert read_summary(out)["test_accuracy"] == correct / 2100
    assert 0.8 < correct / 2100 < 1


def test_the_same_flags_give_the_same_training_and_another_seed_another(tmp_path, small_npz):
    results = []
    for seed in ("1", "1", "2"):
        out = tmp_path / str(len(results))
        flags = ["--data", str(small_npz), "--epochs", "2", "--batch-size", "10", "--seed", seed]
        main(["train", "sgd", *flags, "--quiet", "--out", str(out)])
        with np.load(out / "steps.npz") as steps:
            results.append(steps["loss"])
    np.testing.assert_array_equal(results[0], results[1])
    assert np.all(results[0] != results[2])


def test_each_epoch_sees_every_example_once_in_a_new_order(tmp_path, small_npz):
    out = tmp_path / "run"
    flags = ["--data", str(small_npz), "--batch-size", "10", "--epochs", "3"]
    main(["train", "sgd", "--learning-rate", "0", *flags, "--quiet", "--out", str(out)])
    with np.load(out / "steps.npz") as steps:
        loss = np.sort(steps["loss"].reshape(3, 4), axis=1)
    # Nothing is learned: the batches' losses tell how the examples were shuffled.
    np.testing.assert_allclose(loss.mean(axis=1), loss.mean(), rtol=1e-5)
    assert np.all(loss[0] != loss[1])
    assert np.all(loss[1] != loss[2])


def test_constant_sgd_predicts_by_its_draws(tmp_path, small_npz, capsys):
    out = tmp_path / "run"
    flags = ["--data", str(small_npz), "--hidden", "7", "--batch-size", "10", "--epochs", "3"]
    flags += ["--burn-in", "3", "--draw-every", "2", "--max-draws", "3", "--out", str(out)]
    assert main(["train", "constant-sgd", *flags]) == 0
    assert {path.name for path in out.iterdir()} == FILES | {
        "params.npz",
        "draws.npz",
        "reliability.png",
    }
    summary = read_summary(out)
    assert summary["phase"] == "sampling"
    assert summary["gradient_evaluations"] == 2 * 12 * 10
    assert summary["posterior"]["draws"] == 3  # of those at 4, 6, 8 and 10 the last ones
    with np.load(out / "draws.npz") as file:
        draws = dict(file)
    spec, last = run_folder.rebuild(out)
    with np.load(small_npz) as data:
        x, y = data["x_test"], data["y_test"]
    by_draw = [
        jax.nn.softmax(models.logits(models.build(spec), params, x))
        for params in (
            {
                layer: {kind: draws[f"{layer}.{kind}"][0, index] for kind in leaves}
                for layer, leaves in last.items()
            }
            for index in range(3)
        )
    ]
    assert not np.array_equal(by_draw[0], by_draw[1])
    mean = np.mean(by_draw, axis=0)
    found = summary["posterior"]
    assert found["accuracy"] == np.mean(np.argmax(mean, axis=1) == y)
    nll = -np.mean(np.log(mean[np.arange(len(y)), y]))
    assert found["negative_log_likelihood"] == pytest.approx(nll, rel=1e-4)
    exact = optperm.calibration(mean, y).expected_calibration_error
    assert found["expected_calibration_error"] == pytest.approx(float(exact), abs=1e-5)
    assert summary["last_iterate"]["accuracy"] == summary["test_accuracy"]
    assert "calibration error" in capsys.readouterr().out.replace("\n", " ").replace("  ", "")
    assert (out / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_constant_sgd_without_a_draw_says_none(tmp_path, small_npz):
    out = tmp_path / "run"
    flags = ["--data", str(small_npz), "--batch-size", "10", "--epochs", "1", "--quiet"]
    assert main(["train", "constant-sgd", *flags, "--out", str(out)]) == 0
    assert read_summary(out)["posterior"] is None
    assert {path.name for path in out.iterdir()} == FILES | {"params.npz"}


def test_sgperm_keeps_the_weights_and_evaluate_reproduces_the_accuracy(tmp_path, capsys):
    out = tmp_path / "run"
    assert main(["train", "sgperm", "--hidden", "8", "--epochs", "1", "--out", str(out)]) == 0
    summary = read_summary(out)
    assert {path.name for path in out.iterdir()} == FILES | {"permutation.npz"}
    assert 0 < summary["share_moved"] < 1
    assert summary["hyperparameters"].keys() == methods.METHODS["sgperm"].flags.keys()
    untrained, trained = read_metrics(out)
    assert trained["test_accuracy"] > untrained["test_accuracy"]

    spec, params = run_folder.rebuild(out)
    initial = models.initial_params(spec)
    for before, after in zip(jax.tree.leaves(initial), jax.tree.leaves(params), strict=True):
        assert np.any(np.asarray(before) != np.asarray(after))
        np.testing.assert_array_equal(np.sort(before, axis=None), np.sort(after, axis=None))

    capsys.readouterr()
    assert main(["evaluate", str(out)]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary['test_accuracy']:.4f}\n"


def test_laperm_keeps_and_tests_what_is_synchronized(tmp_path, small_npz):
    """No epoch of the three ends with a synchronization: each is tested as a run that ended there, and
    what is kept are the initial weights in another order."""

    def train(epochs, every):
        out = tmp_path / f"{epochs}-{every}"
        flags = ["--batch-size", "10", "--learning-rate", "0.05", "--sync-every", str(every)]
        flags += ["--data", str(small_npz), "--epochs", str(epochs), "--quiet", "--out", str(out)]
        assert main(["train", "laperm", *flags]) == 0
        return out

    whole = train(3, 5)
    assert read_summary(whole)["steps"] == 12
    _, *epochs = read_metrics(whole)
    for number, record in enumerate(epochs, start=1):
        part = whole if number == 3 else train(number, 5)
        assert read_summary(part)["test_accuracy"] == record["test_accuracy"]
        assert main(["evaluate", str(part)]) == 0
    spec, params = run_folder.rebuild(whole)
    support.assert_permutes(params, models.initial_params(spec))
    assert run_folder.digest(params) != run_folder.digest(models.initial_params(spec))
    assert epochs[-1]["test_accuracy"] > 0.8


def test_evaluate_notices_weights_that_are_not_those_trained(tmp_path, capsys):
    out = tmp_path / "run"
    main(["train", "sgperm", "--hidden", "4", "--epochs", "0", "--quiet", "--out", str(out)])
    path = out / "permutation.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **arrays | {"seed": np.array(1)})
    assert main(["evaluate", str(out)]) == 1
    assert "gives other weights here" in error_line(capsys)
    del arrays["digest"]
    np.savez(path, **arrays)
    assert main(["evaluate", str(out)]) == 1
    assert "is damaged or was not written by optperm" in error_line(capsys)
    path.unlink()
    assert main(["evaluate", str(out)]) == 1
    assert "holds no trained network" in error_line(capsys)


def test_evaluate_notices_data_that_changed(tmp_path, small_npz, capsys):
    out = tmp_path / "run"
    flags = ["--data", str(small_npz), "--batch-size", "10", "--quiet", "--out", str(out)]
    main(["train", "sgd", *flags])
    with np.load(small_npz) as file:
        arrays = dict(file)
    np.savez(small_npz, **arrays | {"y_test": 1 - arrays["y_test"]})
    assert main(["evaluate", str(out)]) == 1
    assert "the data have changed" in error_line(capsys)
    assert main(["evaluate", str(out), "--data", str(small_npz)]) == 0
    assert (
        capsys.readouterr().out == f"test accuracy {1 - read_summary(out)['test_accuracy']:.4f}\n"
    )
    assert main(["evaluate", str(out), "--data", "digits"]) == 1
    assert "examples of shape [8, 8], but the network was trained on shape [6]" in error_line(
        capsys
    )


def test_quiet_prints_nothing(tmp_path, capsys):
    flags = ["--hidden", "4", "--epochs", "1", "--quiet", "--out", str(tmp_path / "run")]
    assert main(["train", "sgperm", *flags]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_phases_of_dldr_are_shown_and_kept(tmp_path, small_npz, capsys):
    out = tmp_path / "run"
    flags = ["--start", "3", "--sample-every", "3", "--num-samples", "4", "--n-components", "3"]
    flags += ["--second-phase", "sgd"]
    flags += ["--data", str(small_npz), "--hidden", "8", "--batch-size", "20", "--epochs", "7"]
    assert main(["train", "dldr", *flags, "--out", str(out)]) == 0
    # Of two steps an epoch, snapshots are taken before the steps 3, 6, 9 and 12, counted from 0.
    taken = [0, 0, 1, 1, 2, 3, 3]
    phases = [*(f"sampling {number}/4" for number in taken), "subspace"]
    assert [line["phase"] for line in read_metrics(out)] == phases
    assert read_summary(out)["phase"] == "subspace"
    shown = capsys.readouterr().out.splitlines()
    for epoch, phase in enumerate(phases):
        assert shown[epoch].startswith(f"epoch {epoch}/7 {phase} ")
    assert any(line.split() == ["phase", "subspace"] for line in shown)


def test_without_a_terminal_long_runs_print_few_lines(tmp_path, small_npz, capsys):
    flags = ["--data", str(small_npz), "--batch-size", "40", "--epochs", "95"]
    main(["train", "adam", *flags, "--out", str(tmp_path / "run")])
    epochs = [line.split()[1] for line in capsys.readouterr().out.splitlines() if "epoch " in line]
    assert epochs == [f"{epoch}/95" for epoch in (*range(0, 95, 10), 95)]


def test_results_are_never_overwritten(tmp_path, small_npz, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--data", "small.npz", "--batch-size", "10", "--epochs", "0", "--quiet"]
    for _ in range(3):
        assert main(["train", "sgd", *flags]) == 0
    first = tmp_path / "runs" / "sgd-mlp-small-s0"
    assert sorted(path.name for path in first.parent.iterdir()) == [
        first.name,
        f"{first.name}-2",
        f"{first.name}-3",
    ]
    before = {path: path.read_bytes() for path in first.iterdir()}
    assert main(["train", "sgd", *flags, "--out", str(first)]) == 2
    assert "exists and is not an empty folder" in error_line(capsys)
    assert before == {path: path.read_bytes() for path in first.iterdir()}


def test_a_run_that_diverges_is_still_valid_json(tmp_path, capsys):
    out = tmp_path / "run"
    main(["train", "sgd", "--learning-rate", "1e30", "--epochs", "1", "--out", str(out)])
    assert read_summary(out)["train_loss"] is None
    assert "try a smaller --learning-rate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["adam", "--epochs", "-1"], "--epochs: must be at least 0, got -1"),
        (["adam", "--epochs", "many"], "--epochs: invalid integer value: 'many'"),
        (["adam", "--batch-size", "0"], "--batch-size: must be at least 1"),
        (["adam", "--hidden", "0"], "--hidden: must be at least 1"),
        (["adam", "--seed", "4294967296"], "--seed: must be at most 4294967295"),
        (["adam", "--learning-rate", "inf"], "must be a finite number, got inf"),
        (["adam", "--learning-rate", "fast"], "invalid number value: 'fast'"),
        (["adam", "--momentum", "0.9"], "unrecognized arguments: --momentum"),
        (["adam", "--lear", "0.9"], "unrecognized arguments: --lear"),
        (["adam", "--model", "gpt"], "invalid choice: 'gpt'"),
        (["lion"], "invalid choice: 'lion'"),
        ([], "required: METHOD"),
    ],
)
def test_bad_flags_end_with_one_line(flags, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["train", *flags])
    assert caught.value.code == 2
    assert says in error_line(capsys)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["adam", "--batch-size", "41"], "--batch-size 41 is more than the 40 training examples"),
        (["adam", "--b1", "1.5"], "adam: b1 must be in [0, 1], got 1.5"),
        (["sgd", "--learning-rate", "-1"], "sgd: learning_rate must be at least 0, got -1.0"),
        (
            ["sgperm", "--partition-ratio", "2"],
            "sgperm: partition_ratio must be in [0, 1], got 2.0",
        ),
        (["sgperm", "--min-partition-size", "0"], "min_partition_size must be at least 1, got 0"),
        (["adam", "--model", "cnn"], "--model cnn needs images"),
    ],
)
def test_flags_that_do_not_fit_end_with_one_line(tmp_path, small_npz, flags, says, capsys):
    out = tmp_path / "run"
    common = ["--data", str(small_npz), "--batch-size", "10", "--out", str(out)]
    assert main(["train", flags[0], *common, *flags[1:]]) == 2
    assert says in error_line(capsys)
    assert not out.exists()


def test_unusable_paths_end_with_one_line(tmp_path, small_npz, capsys):
    assert main(["train", "adam", "--data", str(tmp_path / "nothing")]) == 1
    assert "there is no such file or folder" in error_line(capsys)
    flags = ["--data", str(small_npz), "--batch-size", "10"]
    assert main(["train", "adam", *flags, "--out", str(small_npz / "below a file")]) == 1
    assert f"cannot write to {small_npz}" in error_line(capsys)
    assert main(["evaluate", str(tmp_path / "nothing")]) == 1
    assert "holds no trained network" in error_line(capsys)


def test_a_missing_extra_ends_with_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["train", "adam"]) == 1
    assert "pip install 'optperm[cli]'" in error_line(capsys)


def test_importing_the_command_line_needs_no_extra():
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'sklearn'): sys.modules[name] = None\n"
        "import optperm.cli.main\n"
        "optperm.cli.main.main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("optperm ")


def test_every_flag_of_a_method_is_a_parameter_with_a_default():
    for method in methods.METHODS.values():
        for name, default in method.defaults().items():
            assert type(default) in (bool, int, float, str), (method.name, name)
            if isinstance(default, str):
                assert default in method.choices(name)
        assert method.period is None or method.period in method.flags


def test_what_the_run_knows_reaches_the_methods_that_ask_for_it():
    given = {}

    def build(rate=0.5, *, num_data, seed, axis_name=None):
        given.update(rate=rate, num_data=num_data, seed=seed, axis_name=axis_name)
        return methods.METHODS["sgd"].build()

    method = methods.Method("probe", "", build, {"rate": "a rate"})
    facts = {"num_data": 7, "seed": 3, "batch_size": 5, "axis_name": "replica"}
    method.transformation({"rate": 0.25}, facts)
    assert given == {"rate": 0.25, "num_data": 7, "seed": 3, "axis_name": "replica"}


def test_error_lines_are_one_line():
    assert errors.UsageError("x").exit_code == 2
    assert errors.CliError("x").exit_code == 1


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "optperm.cli.main", "train", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


def wait_for(condition, process, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_saves_what_was_learned(tmp_path, capsys):
    out = tmp_path / "run"
    process = start("adam", "--epochs", "1000000", "--hidden", "64", "--out", str(out))
    metrics = out / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    summary = read_summary(out)
    assert summary["interrupted"] is True
    assert 5 <= summary["epochs_done"] < 1_000_000
    assert summary["epochs_done"] == len(read_metrics(out)) - 1
    assert {path.name for path in out.iterdir()} == FILES | {"params.npz"}
    assert main(["evaluate", str(out)]) == 0
    assert capsys.readouterr().out == f"test accuracy {summary['test_accuracy']:.4f}\n"


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    out = tmp_path / "run"
    # Nothing ends this epoch within the test: a minute of steps in one compiled call.
    data = tmp_path / "data.npz"
    x, y = np.zeros((20_000, 900), np.uint8), np.zeros(20_000, int)
    np.savez_compressed(data, x_train=x, y_train=y, x_test=x[:10], y_test=y[:10] + 1)
    process = start(
        *("sgd", "--data", str(data), "--hidden", "2048", "--batch-size", "1"),
        *("--epochs", "1", "--out", str(out)),
    )
    metrics = out / "metrics.jsonl"
    try:
        wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == 1, process)
        time.sleep(2.0)  # into the epoch: before it there is nothing to finish
        process.send_signal(signal.SIGINT)
        said = iter(process.stdout.readline, "")
        assert any("Finishing this epoch, then saving" in line for line in said)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=5)
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 130
    assert err == "optperm: error: stopped by Ctrl-C.\n"
    assert not (out / "summary.json").exists()


@pytest.mark.parametrize("environment", [{"PYTHONIOENCODING": "ascii"}, {"COLUMNS": "12"}])
def test_odd_terminals_lose_no_run(tmp_path, small_npz, environment):
    out = tmp_path / "l\u00e4ufe"
    process = start(
        *("adam", "--data", str(small_npz), "--batch-size", "10", "--out", str(out)), **environment
    )
    out_text, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    assert "Files in " in out_text
    assert (out / "summary.json").exists()


def test_a_closed_pipe_loses_no_run(tmp_path, small_npz):
    out = tmp_path / "run"
    process = start("adam", "--data", str(small_npz), "--batch-size", "10", "--out", str(out))
    with process:
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
    assert (out / "summary.json").exists()
