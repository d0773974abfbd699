"""The example `sites.py`: processes over files, one slow, killed or late."""

import ast
import os
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

import optperm

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("lenient")]

PROGRAM = pathlib.Path(__file__).parents[2] / "examples" / "sites.py"
SECONDS, SLEEP, EVERY = 12, 0.01, 20
# A job that has imported all, and begins when there is a file.
LATE = """
import pathlib, runpy, sys, time
import jax, optperm, sklearn.datasets
while not pathlib.Path(sys.argv[1], "go").exists():
    time.sleep(0.02)
runpy.run_path("sites.py", run_name="__main__")
"""


class Run:
    """Processes of the program in a folder."""

    def __init__(self, folder):
        shutil.copy(PROGRAM, folder)
        self.folder, self.started = folder, []
        settings = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "OMP_NUM_THREADS": "1"}
        settings |= {"JAX_COMPILATION_CACHE_DIR": str(folder / "cache")}
        settings |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        settings |= {"PYTHONPATH": str(pathlib.Path(optperm.__file__).parents[1])}
        self.options = {"cwd": folder, "env": os.environ | settings, "text": True}

    def start(self, *words, program=("sites.py",)):
        command = [sys.executable, *program, str(self.folder), *map(str, words)]
        out = subprocess.PIPE if words[0] == "center" else subprocess.DEVNULL
        self.started.append(subprocess.Popen(command, stdout=out, **self.options))
        return self.started[-1]

    def end(self):
        for each in self.started:
            each.kill()
            each.communicate()


@pytest.fixture
def run(tmp_path):
    made = Run(tmp_path)
    yield made
    made.end()


def train_in_step(folder, steps):
    """Return the test loss of four replicas that commit in step, with Nesterov momentum."""
    sites = runpy.run_path(str(folder / "sites.py"))
    x, y, loss_fn = (sites[name] for name in ("x", "y", "loss_fn"))
    x, y = jax.numpy.asarray(x), jax.numpy.asarray(y)
    outer = optax.sgd(0.8, momentum=0.5, nesterov=True)
    tx = optperm.diloco(optax.adam(1e-3), outer, every=EVERY, axis_name="job")

    def on_replica(params, opt_state, row):
        grads = jax.grad(loss_fn)(params, x[row], y[row])
        updates, opt_state = tx.update(grads, opt_state, params)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    mapped = jax.vmap(on_replica, axis_name="job")
    params = jax.tree.map(lambda leaf: np.stack([leaf] * 4), sites["params"])
    rows = np.random.default_rng(0).integers(0, sites["TRAIN"], (steps, 4, sites["BATCH"]))
    start = params, jax.vmap(tx.init)(params)
    train = jax.jit(lambda *start: jax.lax.scan(lambda c, r: (mapped(*c, r), None), start, rows)[0])
    center = jax.tree.map(lambda leaf: leaf[0], train(*start)[1].center)
    return float(loss_fn(center, x[sites["TRAIN"] :], y[sites["TRAIN"] :]))


def test_jobs_over_files_survive_a_kill_and_beat_the_run_in_step(run):
    """With a slow job, a late job and a message that is torn, in the same time."""
    center = run.start("center", SECONDS)
    killed, *others = [run.start(f"job{i}", SLEEP * k) for i, k in enumerate((1, 1, 1, 3))]
    others.append(run.start("late", SLEEP, program=("-c", LATE)))
    while not list(run.folder.glob("message-*.npz")):
        assert center.poll() is None
        time.sleep(0.05)
    (run.folder / "message-torn-0.npz").write_bytes(b"PK\x03\x04 and no more")
    np.savez(run.folder / "message-other-0.npz", np.zeros(3))
    (run.folder / "go").touch()
    time.sleep(0.4 * SECONDS)
    killed.kill()
    said = center.communicate(timeout=120)[0]
    assert [each.wait(timeout=60) for each in (center, killed, *others)] == [0, -9, 0, 0, 0, 0]
    assert "left out message-torn-0.npz" in said
    assert "left out message-other-0.npz" in said
    loss, steps = re.search(r"^loss ([\d.]+) .* steps (\{.*\})$", said, re.M).groups()
    steps = ast.literal_eval(steps)
    assert steps.keys() == {"job0", "job1", "job2", "job3", "late"}
    assert steps["job3"] < 0.6 * steps["job1"]  # which waits for nobody
    in_step = train_in_step(run.folder, EVERY * round(SECONDS / (3 * SLEEP * EVERY)))
    assert float(loss) < in_step, (said, in_step)
