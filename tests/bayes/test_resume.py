"""Runs of `sample` that were killed, and runs that were not: the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.bayes import _resume, _sample
from optperm.bayes._resume import Progress, fingerprint

pytestmark = pytest.mark.filterwarnings(
    "ignore:The maximum split R-hat", "ignore:The minimum effective", "ignore:The warm-up has not",
    "ignore:The noise of the",
)  # fmt: skip
Y = np.float32(np.random.default_rng(0).normal(3, size=(64, 2)))
ARGUMENTS = {"key": 1, "batch_size": 4, "num_chains": 2, "num_draws": 20, "thinning": 2}


def loss_fn(w, batch):
    return jnp.mean(jnp.sum((batch - w[None]) ** 2, axis=-1)) / 2


def sgld(n, s):
    del s
    return optperm.sgld(1e-4, n)


def with_svrg(n, s):
    return optax.chain(optperm.svrg(), sgld(n, s))


def run(**options):
    given = {"loss_fn": loss_fn, "data": Y, "params": jnp.zeros(2)}
    return optperm.bayes.sample(**given | ARGUMENTS | options)


class Killed(BaseException):
    """A signal, as far as the program is concerned."""


def kill(*_, **__):
    raise Killed


# Given starts need no search
QUICK = {"sampler": sgld, "burn_in": 3, "starts": Y[:2]}


@pytest.fixture(autouse=True)
def _three_parts(monkeypatch):
    monkeypatch.setattr(_sample, "_PARTS", 3)


def run_and_note(folder, sampler):
    """Return the folder, the samples and the shown draws of a run in three parts."""
    shown, given = [], QUICK | {"sampler": sampler}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_sample, "_PARTS", 3)
        found = run(
            **given, resume=folder, on_draws=lambda n, new: shown.append((n, np.array(new)))
        )
    return folder, found, shown


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """An undisturbed run."""
    return run_and_note(tmp_path_factory.mktemp("run"), sgld)


@pytest.mark.parametrize("sampler", support.every_night([sgld, with_svrg], [sgld]))
def test_a_run_that_dies_while_it_writes_has_the_bits_of_an_undisturbed_run(
    sampler, tmp_path, monkeypatch, finished
):
    """It writes a few files, and dies before the next one has its name: draws, or states of chains."""
    if sampler is not sgld:
        finished = run_and_note(tmp_path / "finished", sampler)
    written, names, died = [], [], []

    def write(self, name, content, write=Progress._write):
        names.append(name)
        write(self, name, content)

    def fsync(file, fsync=os.fsync):
        written.append(file)
        # Between the second draws and their states, and before the third draws
        if len(written) > (4 if attempts == 1 else 2):
            died.append(names[-1])
            os.ftruncate(file, 10)
            raise Killed
        fsync(file)

    monkeypatch.setattr(Progress, "_write", write)
    monkeypatch.setattr(_resume.os, "fsync", fsync)
    attempts = 0
    while attempts < 9:
        attempts += 1
        written.clear()
        try:
            _, found, again = run_and_note(tmp_path / "run", sampler)
        except Killed:
            continue
        break
    assert died == ["chains.npz", "draws-03.npz"]
    _, wanted, shown = finished
    support.assert_same_bits(found, wanted)
    support.assert_same_bits(again, shown)


@pytest.mark.slow
def test_kernels_are_learned_once_and_are_the_same_without_a_folder(tmp_path, monkeypatch):
    wanted = run()
    with monkeypatch.context() as patched:
        patched.setattr(_sample, "learn_kernels", kill)
        with pytest.raises(Killed):
            run(resume=tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(_sample, "search_starts", kill)
        patched.setattr(_sample, "_collect", kill)
        with pytest.raises(Killed):
            run(resume=tmp_path)
    monkeypatch.setattr(_sample, "learn_kernels", kill)
    support.assert_same_bits(run(resume=tmp_path), wanted)


PROGRAM = """
import os, signal, sys
sys.path[:0] = ["tests", "tests/bayes"]
import jax, numpy as np, test_resume as t
from optperm.bayes import _resume, _sample

folder, phase = sys.argv[1:]

def dying(function, when):
    calls = []
    def call(*arguments, **options):
        calls.append(1)
        if len(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)
    return call

_sample.search_starts = dying(_sample.search_starts, 1 if phase == "search" else 0)
_sample.learn_kernels = dying(_sample.learn_kernels, 1 if phase == "learning" else 0)
_sample._Chains.draw = dying(_sample._Chains.draw, 6 if phase == "draws" else 0)
samples = t.run(resume=None if folder == "-" else folder)
print(*(np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(samples)))
"""


@pytest.mark.programs
def test_processes_that_are_killed_in_each_phase_have_the_bits_of_an_undisturbed_one(tmp_path):
    """SIGKILL in the search, in the learning and in the draws of one run."""

    def start(folder, phase):
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", PROGRAM, folder, phase],
            capture_output=True, text=True, check=False, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    for phase in ("search", "learning", "draws"):
        done = start(str(tmp_path / "run"), phase)
        assert done.returncode == -signal.SIGKILL, done.stderr
    found, wanted = start(str(tmp_path / "run"), "none"), start("-", "none")
    assert wanted.returncode == found.returncode == 0, wanted.stderr + found.stderr
    assert len(wanted.stdout) > 1000
    assert found.stdout == wanted.stdout


def test_other_arguments_are_refused_by_name(tmp_path, finished):
    np.save(tmp_path / "y.npy", Y)
    on_disk = np.load(tmp_path / "y.npy", mmap_mode="r")
    for change, says in (
        ({"key": 2}, "key is"),
        ({"data": Y + 1}, "data is"),
        ({"data": Y[:60]}, "num_data is 64 there and 60 here; data is"),
        ({"batch_size": 8}, "batch_size is 4 there and 8 here"),
        ({"num_draws": 30}, "num_draws is 20 there and 30 here"),
        ({"params": jnp.ones(2)}, "params is"),
        ({"starts": jnp.ones((2, 2))}, "starts is"),
        ({"loss_fn": lambda w, y: 2 * loss_fn(w, y)}, "loss of a batch is"),
        ({"data": on_disk}, "place of the data is memory there and host here"),
        ({"sampler": None}, "sampler is a function there and None here"),
    ):
        with pytest.raises(ValueError, match=f"run with other arguments: .*{says}"):
            run(**QUICK | change, resume=finished[0])


def test_a_damaged_file_and_a_file_for_a_folder_are_named(tmp_path, finished):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    (folder / "draws-03.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"draws-03.npz is damaged"):
        run(**QUICK, resume=folder)
    (folder / "draws-03.npz").unlink()
    with pytest.raises(ValueError, match=r"draws-03.npz is missing"):
        run(**QUICK, resume=folder)
    with pytest.raises(ValueError, match="resume must be a folder"):
        run(**QUICK, resume=folder / "run.json")
    with pytest.raises(TypeError, match="resume must be the path of a folder, got 3"):
        run(**QUICK, resume=3)


def test_arrays_of_each_dtype_come_back_with_their_bits(tmp_path):
    """Keys, 16-bit floats and arrays without entries too."""
    tree = {
        "narrow": jnp.bfloat16([1.5, -2.0]), "count": jnp.int32(3), "none": jnp.zeros((0, 2)),
        "key": jax.random.split(jax.random.key(0, impl="rbg"), 2), "flag": jnp.array([True]),
    }  # fmt: skip
    progress = Progress(tmp_path, {})
    like = jax.eval_shape(lambda: tree)
    found, texts = progress.phase("a", lambda: (tree, ["ü"]), lambda: like)
    assert texts == ["ü"]
    for each in (found, Progress(tmp_path, {}).load("a", like)):
        support.assert_same_bits(each | {"key": jax.random.key_data(each["key"])},
                                 tree | {"key": jax.random.key_data(tree["key"])})  # fmt: skip
        assert each["key"].dtype == tree["key"].dtype
    assert json.loads((tmp_path / "run.json").read_text()) == {"format": 1}


def test_fingerprints_tell_arrays_apart_by_shape_dtype_name_and_bytes(tmp_path):
    path = tmp_path / "y.npy"
    np.save(path, Y)
    on_disk = np.load(path, mmap_mode="r")
    trees = [
        {"a": Y}, {"b": Y}, {"a": Y.T}, {"a": np.float64(Y)}, {"a": -Y}, {"a": on_disk[:32]}, None
    ]  # fmt: skip
    assert len({fingerprint(tree) for tree in trees}) == len(trees)
    assert fingerprint({"a": jnp.asarray(Y)}) == fingerprint({"a": on_disk})
