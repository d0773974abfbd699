"""Every benchmark runs, at its smallest size, and prints its figures."""

import contextlib
import importlib
import itertools
import json
import os
import pathlib
import re
import runpy
import shlex
import sys
import types

import jax
import numpy as np
import pytest
import scoring
import support
from sklearn.metrics import log_loss

ROOT = pathlib.Path(__file__).parents[1]
# Scripts and flags that make them small, and of tables, or of functions that make one, what is left.
# Other parts of a script run by night.
USUAL = {
    "distributed.py --only local periods stacked traffic commits --repetitions 1 --leaves 2 "
    "--leaf-size 100": {
        "OPTIMIZERS": ("Adam",),
        "COMMITTING": ("Adam",),
        "RULES": ("mean",),
    },
    "constant_sgd.py --only steps --repetitions 3": {
        "samplers": ("SGD", "mandt_sgd, single_example", "sgld")
    },
    "training.py --only methods --methods sgd svrg --seeds 1 --epochs 1 --units 4": {},
    "compile.py --leaves 4,8 --shapes 2 --only agn ivon mask_elements": {},
    "memory.py --only memory --smallest": {},
    "scale.py --size 0 --steps 2 --batch 2 --context 8 --seeds 2 --rates 0.01 --decays 0.1 "
    "--methods AdamW 'AdamW, widened, 8 bits' SCALE": {"TESTS": 2},
    "posterior.py --mlp --steps 20 --seeds 1 --grid 1 --methods SGD": {},
    "sparsity.py --only images --seeds 1 --epochs 0.6 --sparsity 0.9 --every 1": {
        "ROWS": ("dense", "RigL, ERK")
    },
    "uncertainty.py --seeds 1 --epochs 0.2 --methods Adam temperature IVON": {},
    "permutation.py --only methods values bytes --seeds 1 --epochs 0.9": {
        "METHODS": ("SGPerm", "Adam"),
        "VALUES": (2,),
    },
    "subspace.py --only images --seeds 1 --steps 30 --labels wrong": {
        "METHODS": ("SWA", "dldr, dim_reduce")
    },
    "variance.py --only table --examples 100 --lbfgs-passes 4 --saga-passes 2 --svrg-passes 5 --seeds 1 "
    "--batch-sizes 50": {},
}
RUNS = USUAL | {
    "convex.py --only elastic logistic l1 poisson conditions rows --limit 1 --max-passes 3": {
        "EXAMPLES": 1000,
        "MANY": 1000,
        "CONDITIONS": (1e2,),
    },
    "distributed.py --only frontier --seeds 1 --steps 20 --width 8 --replicas 2 --inner Muon": {
        "CODES": ("1 bit",),
        "PERIODS": (10,),
    },
    "training.py --only cost --repetitions 1 --seconds 0.01 --hidden 4": {},
    "posterior.py --problems quadratic --batch-sizes 32 --seeds 1 --steps 50 --defaults": {},
    "nuts.py --problems logistic-500 --seconds 0.01 --draws 40": {"FEWEST": 4, "WARM_UP": 20},
    "sparsity.py --only sweep --seeds 1 --fractions 3 --sweep-steps 2 2 --hidden 4": {},
    "uncertainty.py --only defaults --seeds 1 --steps 2": {"TASKS": ("MLP", "transformer")},
    "permutation.py --only speed --repetitions 1": {"SHAPES": ((10, 100),)},
    "variance.py --only rates --rate-passes 1 --batch-sizes 50": {"FACTORS": (1.0,)},
    "subspace.py --only pca update communication --smallest": {},
    "variance.py --only lbfgs --passes 2 --full-passes 4": {},
    "variance.py --only networks --passes 1 --seeds 1 --rates 0.5 --methods SVRG": {
        "SHAPES": ("constant",)
    },
    "distributed.py --only outer --seeds 1 --width 8": {
        "SETTINGS": (("MLP", 4, 2), ("decoder", 4, 2)),
        "OUTER": ("averaging",),
        "RATES": (1e-2,),
    },
    "memory.py --only train --steps 3 --seeds 1 --width 16 --context 8 --methods AdamW apollo": {
        "RATES": (1e-2,),
        "LOW": (1.0,),
    },
    "memory.py --only images --steps 6 --seeds 1 --methods AdamW": {},
    "widen.py --only train --steps 3 --seeds 1 --few 1": {
        "METHODS": ("AdamW, float32", "AdamW, 8 bits more"),
        "TESTS": 2,
    },
    "widen.py --only update --repetitions 1 --smallest": {},
    "widen.py --only memory --smallest": {},
    "scale.py --size 0 --steps 2 --batch 2 --context 8 --seeds 1 --rates 0.01 0.03 --decays 0 0.1": {
        "TESTS": 2
    },
    "scale.py --memory --size 0 --batch 2 --context 8 --methods Muon low_rank apollo": {},
    "sparsity.py --only transformer --steps 36 --seeds 1": {
        "DECODER_RATES": (1e-2,),
        "METHODS": ("2:4 straight-through",),
    },
    "variance.py --only steps --repetitions 1 --width 4 --batches 2": {},
    "variance.py --only variance --epochs 1": {},
    "variance.py --only convex --passes 1 --seeds 1 --rates 0.5 --methods SVRG": {
        "SHAPES": ("constant",)
    },
    "variance.py --only mars --steps 2 --seeds 1 --adamw-rates 1e-3 --repetitions 1": {
        "MARS": ("mars",)
    },
}
ELSEWHERE = {"accelerators.py"}  # has tests of its own
# What they share.
SHARED = {"images.py", "results.py", "scoring.py", "small_tasks.py", "accelerator_programs.py"}
SHARED |= {"collectives.py", "library_bytes.py", "timing.py"}


def part_of(table, left):
    """What is left of a table, or of what a function makes."""
    if callable(table):
        return lambda *arguments: part_of(table(*arguments), left)
    return {key: table[key] for key in left} if isinstance(table, dict) else left


@pytest.mark.programs
@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("command", support.every_night(RUNS, USUAL))
def test_benchmark_at_its_smallest_size_prints_and_keeps_its_figures(
    command, monkeypatch, capfd, tmp_path
):
    """In this process, on the suite's eight devices and beside other tests."""
    script, *flags = shlex.split(command)
    path, kept = ROOT / "benchmarks" / script, tmp_path / "new" / "found.json"
    monkeypatch.setattr(sys, "argv", [str(path), *flags, "--loaded", "--json", str(kept)])
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"])
    update = jax.config.update
    # The devices that a script asks JAX for before it starts are here.
    monkeypatch.setattr(
        jax.config, "update", lambda *option: "jax_num_cpu_devices" in option or update(*option)
    )
    small = importlib.import_module("library_bytes")
    monkeypatch.setattr(small, "LAYERS", 1)
    monkeypatch.setattr(small, "WIDTH", 8)
    monkeypatch.setattr(small, "CONTEXT", small.CONTEXT)  # a script may set it
    main = runpy.run_path(str(path))["main"]
    for name, left in RUNS[command].items():
        main.__globals__[name] = part_of(main.__globals__[name], left)
    main()
    printed = capfd.readouterr().out.strip().splitlines()
    assert re.search(r"\d", printed[-1])
    found = json.loads(kept.read_text())
    assert found["command"] == f"python benchmarks/{command} --loaded"
    assert found["machine"].endswith(", with other programs running")
    for table in found["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert any(re.search(r"\d", cell) for cell in found["tables"][-1]["rows"][-1])


def test_no_benchmark_is_left_out():
    """One that is new joins `RUNS`."""
    there = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert there == {command.split()[0] for command in RUNS} | ELSEWHERE | SHARED


@pytest.fixture
def timing(monkeypatch):
    """The helper on a machine without load, for a command without flags."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    monkeypatch.setattr(sys, "argv", ["any.py"])
    module = importlib.import_module("timing")
    monkeypatch.setattr(module, "LOAD", 0.5)
    return module


def test_times_on_a_loaded_machine_are_refused_before_they_are_taken(timing, monkeypatch):
    monkeypatch.setattr(timing, "LOAD", 0.51)
    called = []
    with pytest.raises(SystemExit, match=r"load was 0\.51 at the start, above 0\.5.*--loaded"):
        timing.take_turns({"call": lambda: called.append(1)}, 1)
    assert called == []
    monkeypatch.setattr(sys, "argv", ["any.py", "--loaded"])
    assert len(timing.take_turns({"call": lambda: called.append(1)}, 1)["call"]) == 1


@pytest.mark.parametrize(("wall", "is_refused"), [(5.9, False), (6.1, True)])
def test_times_that_waited_for_other_programs_are_refused(timing, monkeypatch, wall, is_refused):
    """Three seconds of the processor, in less and in more than six on the wall."""
    clocks = {"perf_counter": [1.0, 1.0 + wall], "process_time": [1.0, 4.0]}
    clocks = {name: iter(times).__next__ for name, times in clocks.items()}
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(**clocks))
    with contextlib.ExitStack() as stack:
        if is_refused:
            stack.enter_context(pytest.raises(SystemExit, match=r"was 2\.0 times the processor"))
        with timing.undisturbed():
            pass


def test_results_of_a_loaded_machine_say_so(timing, monkeypatch, tmp_path):
    """With the flag, in the machine that stands below each table."""
    found, machines = timing.results.Results(), []
    found.row("Times", name="a", ms="1")
    for flags in ([], ["--loaded"]):
        monkeypatch.setattr(sys, "argv", ["any.py", *flags])
        found.write(tmp_path / "found.json")
        machines.append(json.loads((tmp_path / "found.json").read_text())["machine"])
    assert machines[1] == f"{machines[0]}, with other programs running"


def test_scores_by_hand():
    """Of confidences inside of bins and on their edges, which belong to the bin below, and of ties."""
    rng = np.random.default_rng(0)
    on_edges = np.array([[k / 15, (1 - k / 15) / 2, (1 - k / 15) / 2] for k in range(5, 15)])
    p = np.concatenate([rng.dirichlet([1.0, 1.0, 1.0], size=400), on_edges]).astype(np.float32)
    labels = rng.integers(0, 3, size=len(p))
    right, confidences, error = p.argmax(axis=1) == labels, p.max(axis=1), 0.0
    for low, high in itertools.pairwise(np.float32([b / 15 for b in range(16)])):
        inside = (low < confidences) & (confidences <= high)
        error += abs(np.sum(right[inside] - confidences[inside].astype(float))) / len(p)
    distances = [
        np.sum((row - np.eye(3)[label]) ** 2) for row, label in zip(p, labels, strict=True)
    ]
    wanted = np.mean(right), log_loss(labels, p), np.mean(distances), error
    np.testing.assert_allclose(scoring.classification(p, labels), wanted, rtol=1e-5)
    sure = np.tile(np.float32([0.9, 0.1]), (6, 1))
    assert scoring.classification(sure, np.ones(6, int)).calibration_error == pytest.approx(0.9)
    assert scoring.auroc([0.1, 0.2], [0.2, 0.3]) == 0.875
