"""`optperm sweep` as a user meets it, and what its networks have to be."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import optax
import pytest

import optperm
from optperm.cli import datasets, sweep
from optperm.cli.main import main
from optperm.training.interrupt import Interrupt

FILES = {"accuracy.csv", "accuracy.png", "metrics.jsonl", "summary.json"}
SMALL = ["--grid", "3", "--repeats", "2", "--first-steps", "12", "--steps", "30", "--hidden", "5"]
SIZES = (6 * 5, 5, 5 * 3, 3)  # of the arrays, for the examples of the fixture `data`


def read_rows(folder):
    with (folder / "accuracy.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def swept(tmp_path_factory, data):
    """The folder of a small sweep of all curves."""
    out = tmp_path_factory.mktemp("sweep") / "run"
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        assert main(["sweep", "all", *SMALL, "--data", data, "--quiet", "--out", str(out)]) == 0
    return out


def test_every_curve_fraction_and_repeat_is_in_the_csv(swept):
    rows = read_rows(swept)
    assert {path.name for path in swept.iterdir()} == FILES
    assert np.std(matplotlib.image.imread(swept / "accuracy.png")) > 0.01
    keys = [(r["action"], r["criterion"], float(r["fraction"]), r["examples"]) for r in rows]
    assert keys == [
        (*curve, p, examples)
        for curve in sweep.CURVES["all"]
        for p in (0.0, 0.5, 1.0)
        for examples in ("train", "test")
    ]
    metrics = {
        (line["action"], line["criterion"], line["seed"]): line for line in read_metrics(swept)
    }
    assert len(metrics) == 5 * 2
    for row, (action, criterion, p, examples) in zip(rows, keys, strict=True):
        of_seeds = [
            metrics[action, criterion, seed][f"{examples}_accuracy"][int(2 * p)] for seed in (0, 1)
        ]
        assert [float(row[f"seed_{seed}"]) for seed in (0, 1)] == pytest.approx(of_seeds, abs=1e-6)
        assert float(row["mean"]) == pytest.approx(np.mean(of_seeds), abs=1e-5)
        assert float(row["sd"]) == pytest.approx(np.std(of_seeds, ddof=1), abs=1e-5)
        assert int(row["masked"]) == sum(math.floor(p * size) for size in SIZES)


def test_the_ends_of_the_curves_are_what_they_have_to_be(swept, data):
    """Nothing is masked at 0: all curves are one there. At 1 nothing moves any more."""
    with np.load(data) as file:
        first_class = {name: np.mean(file[f"y_{name}"] == 0) for name in ("train", "test")}
    by_seed = {}
    for line in read_metrics(swept):
        by_seed.setdefault(line["seed"], []).append(line)
    for lines in by_seed.values():
        for examples in ("train", "test"):
            name = f"{examples}_accuracy"
            (at_zero,) = {line[name][0] for line in lines}
            assert at_zero != lines[0][f"start_{name}"]  # 30 steps have moved it
            for line in lines:
                whole = line[f"start_{name}"] if line["action"] == "freeze" else None
                # Equal logits, of which the first is taken.
                expected = first_class[examples] if whole is None else whole
                assert line[name][2] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("legacy", [False, True])
def test_a_network_of_the_sweep_is_one_trained_by_itself(data, legacy):
    """With the same start, batches and mask, one at a time; the prior and the limit in both settings."""
    setting = sweep.Setting(
        legacy,
        learning_rate=0.5,
        max_step=0.7,
        prior_precision=2.0,
        noise_start=0.1 if legacy else 0.0,
    )
    plan = sweep.Plan(
        *(sweep.CURVES["all"], setting),
        **{"grid": 3, "repeats": 1, "first_steps": 12, "steps": 30, "hidden": 5, "batch_size": 4},
    )
    loaded = datasets.load(data)
    networks = sweep.Networks(plan, loaded)
    (repeat,) = networks.run(interrupt=Interrupt(), on_call=lambda repeat: None)
    train, test = (
        (jnp.asarray(x), jnp.asarray(y))
        for x, y in ((loaded.x_train, loaded.y_train), (loaded.x_test, loaded.y_test))
    )

    def logits(params, x):
        return jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def loss_fn(params, batch):
        x, y = batch
        outputs = jax.nn.softmax(logits(params, x)) if legacy else logits(params, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, y)
        squares = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
        return jnp.mean(losses) + 2.0 * squares / (2 * 64)

    tx = optax.chain(
        optperm.constant_sgd(
            *(6 * 5 + 5 + 5 * 3 + 3 if legacy else 64, 4),
            learning_rate=0.5,
            estimator="single_example" if legacy else "per_example",
            max_step=0.7,
            burn_in=0,
            freeze_after=None if legacy else 12,
        ),
        optperm.mask_elements(),
    )

    @jax.jit
    def step(params, opt_state, chosen):
        batch, apart = ((train[0][rows], train[1][rows]) for rows in (chosen[:4], chosen[4:]))
        e = optperm.evaluate(loss_fn, params, batch, example=apart)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    keys = jax.random.split(jax.random.key(0), 5)
    kernel = jax.nn.initializers.lecun_normal()
    of_w1, _, of_w2, _ = jax.random.split(keys[0], 4)
    params = {
        "w1": kernel(of_w1, (6, 5)),
        "b1": jnp.zeros(5),
        "w2": kernel(of_w2, (5, 3)),
        "b2": jnp.zeros(3),
    }
    opt_state = tx.init(params)
    if legacy:
        random = optax.tree.random_like(keys[4], params, lambda *of: 0.1 * jax.random.uniform(*of))
        opt_state = optax.tree.set(opt_state, weight=jnp.ones([]), covariance=random)
    for chosen in jax.random.randint(keys[1], (12, 5), 0, 64):
        params, opt_state = step(params, opt_state, chosen)
    grad = optperm.full_gradient(loss_fn, params, [train])
    for index, (action, criterion) in enumerate(plan.curves):
        own, state = params, opt_state
        if action == "prune":
            own, state = optperm.prune(own, state, 0.5, criterion=criterion, key=keys[2])
        else:
            state = optperm.freeze(state, 0.5, scores=grad, criterion=criterion, key=keys[2])
        for chosen in jax.random.randint(keys[3], (30, 5), 0, 64):
            own, state = step(own, state, chosen)
        for (x, y), found in ((train, repeat.train), (test, repeat.test)):
            accuracy = float(jnp.mean(jnp.argmax(logits(own, x), axis=1) == y))
            # Rounding may decide an example or two.
            assert found[index, 1] == pytest.approx(accuracy, abs=2.5 / len(y))


def test_counts_are_exact_on_the_whole_grid(data):
    """Each array has floor(p n) masked for p = i / 50, which Python's or float32's product may miss."""
    plan = sweep.Plan(
        sweep.CURVES["prune"], repeats=1, first_steps=1, steps=0, hidden=50, batch_size=4
    )
    loaded = datasets.load(data)
    (repeat,) = sweep.Networks(plan, loaded).run(interrupt=Interrupt(), on_call=None)
    sizes = (6 * 50, 50, 50 * 3, 3)
    expected = [sum(i * size // 50 for size in sizes) for i in range(51)]
    assert repeat.masked.tolist() == 2 * [expected]
    assert math.floor(29 / 50 * 50) != 29  # so this is a case


def test_the_same_flags_give_the_same_and_another_seed_the_next_repeat(swept, tmp_path, data):
    flags = ["--data", data, "--quiet"]
    main(["sweep", "all", *SMALL, *flags, "--out", str(tmp_path / "again")])
    again = (tmp_path / "again" / "accuracy.csv").read_bytes()
    assert again == (swept / "accuracy.csv").read_bytes()
    main(["sweep", "all", *SMALL, *flags, "--seed", "1", "--out", str(tmp_path / "next")])
    rows, after = read_rows(swept), read_rows(tmp_path / "next")
    assert [row["seed_1"] for row in rows] == [row["seed_1"] for row in after]
    assert [row["seed_0"] for row in rows] != [row["seed_2"] for row in after]


def test_a_part_of_the_curves_of_one_repeat_in_the_legacy_setting(tmp_path, data, capsys):
    out = tmp_path / "run"
    flags = ["--repeats", "1", "--data", data, "--legacy", "--max-step", "7", "--out", str(out)]
    assert main(["sweep", "prune", *SMALL, *flags]) == 0
    assert {(row["action"], row["sd"]) for row in read_rows(out)} == {("prune", "nan")}
    summary = json.loads((out / "summary.json").read_text())
    assert summary["setting"] == {
        "legacy": True,
        "learning_rate": 0.01,
        "noise_start": sweep.SETTINGS[True].noise_start,
        "max_step": 7.0,
        "prior_precision": 0.0,
    }
    assert summary["params"] == sum(SIZES)
    shown = capsys.readouterr().out
    assert "repeat 1/1" in shown
    for row in read_rows(out):
        if (row["fraction"], row["examples"]) == ("0.5", "test"):
            assert f"{float(row['mean']):.3f}" in shown


def test_features_that_are_constant_in_training_are_left_out(tmp_path, data):
    with np.load(data) as file:
        arrays = dict(file)
    for name in ("x_train", "x_test"):
        arrays[name] = np.insert(arrays[name], 2, 3.5, axis=1)
    arrays["x_test"][:, 2] = np.arange(100)
    np.savez(tmp_path / "more.npz", **arrays)
    found = []
    for source in (data, tmp_path / "more.npz"):
        out = tmp_path / str(len(found))
        flags = ["--data", str(source), "--quiet", "--out", str(out)]
        main(["sweep", "freeze", *SMALL, "--repeats", "1", *flags])
        found.append((out / "accuracy.csv").read_text())
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["all", "--grid", "1"], "--grid: must be at least 2, got 1"),
        (["all", "--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["all", "--first-steps", "0"], "--first-steps: must be at least 1, got 0"),
        (["all", "--steps", "-1"], "--steps: must be at least 0, got -1"),
        (["all", "--batch-size", "1"], "--batch-size: must be at least 2, got 1"),
        (["all", "--max-step", "much"], "--max-step: invalid number value: 'much'"),
        (["thaw"], "invalid choice: 'thaw'"),
        ([], "required: ACTION"),
    ],
)
def test_bad_flags_end_with_one_line(flags, says, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["sweep", *flags])
    assert caught.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert says in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--batch-size", "65"], "--batch-size 65 is more than the 64 training examples"),
        (["--prior-precision", "-1"], "--prior-precision must be at least 0, got -1.0"),
        (["--max-step", "0"], "sweep: max_step must be"),
        (["--learning-rate", "-1"], "--learning-rate must be at least 0, got -1.0"),
        (["--noise-start", "-1"], "--noise-start must be at least 0, got -1.0"),
    ],
)
def test_flags_that_do_not_fit_end_with_one_line(tmp_path, data, flags, says, capsys):
    out = tmp_path / "run"
    assert main(["sweep", "all", "--data", data, "--out", str(out), *flags]) == 2
    shown, err = capsys.readouterr()
    assert (shown, err.count("\n")) == ("", 1)
    assert says in err
    assert not out.exists()


@pytest.mark.parametrize("extra", ["matplotlib", "rich"])
def test_a_missing_extra_ends_with_what_to_install(extra, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, extra, None)
    assert main(["sweep", "all"]) == 1
    assert "pip install 'optperm[cli]'" in capsys.readouterr().err


def test_ctrl_c_keeps_the_repeats_that_are_done(tmp_path, data):
    out = tmp_path / "run"
    flags = [*SMALL, "--repeats", "100000", "--data", data, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "optperm.cli.main", "sweep", "prune", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 100
    try:
        while not (metrics.exists() and metrics.read_text().count("\n") > 4):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        shown, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Stopped by Ctrl-C" in shown
    summary = json.loads((out / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert 2 * summary["repeats_done"] == len(read_metrics(out))
    assert sum(name.startswith("seed_") for name in read_rows(out)[0]) == summary["repeats_done"]
