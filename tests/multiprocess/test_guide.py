"""The program of the guide on slow links, on two hosts of two devices, and on one with the same mesh."""

import pathlib
import re
import runpy

import jax
import numpy as np
import processes
import pytest
from sklearn.datasets import load_digits

pytestmark = pytest.mark.programs

FOLDER = pathlib.Path(__file__).parent
GUIDE = FOLDER.parents[1] / "docs" / "guides" / "slow_links.md"
HOSTS = processes.PROCESSES


def write_program(folder, epochs=8, is_whole=True):
    """Write train.py as the guide has it, or with fewer epochs and rare commits in 32 bits.

    With one bit, the rounding of a sum in another order may turn a sign, so runs can be compared in 32
    bits only.
    """
    text = GUIDE.read_text(encoding="utf-8")
    (program,) = re.findall(r":caption: train.py\n(.*?)^```$", text, re.M | re.S)
    changes = {
        "EPOCHS, EVERY = 64, 8, 3": f"EPOCHS, EVERY = 64, {epochs}, 20",
        ", compress=one_bit": "",
    }
    for old, new in () if is_whole else changes.items():
        assert old in program
        program = program.replace(old, new)
    (folder / "train.py").write_text(program, encoding="utf-8")


def train_on_hosts(folder):
    """Run the program on two hosts; return the params that host 0 has written, and the accuracy."""
    said = processes.run_workers(FOLDER / "guide_worker.py", folder / "train.py")
    with np.load(folder / "trained.npz") as file:
        return dict(file), float(re.search(r"^accuracy ([\d.]+)$", said[0], re.M).group(1))


def test_two_hosts_that_resume_train_as_one_process(lenient, tmp_path, monkeypatch):
    """Cut off after 3 of 8 epochs, between two commits."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    parts = {"train-0": order[:700], "train-1": order[700:1400], "test": order[1400:]}
    for name, part in parts.items():
        np.savez(tmp_path / f"{name}.npz", x=np.float32(x / 16)[part], y=np.int32(y)[part])
    monkeypatch.chdir(tmp_path)
    write_program(tmp_path)
    in_one_bit = runpy.run_path(str(tmp_path / "train.py"))
    write_program(tmp_path, is_whole=False)
    program = runpy.run_path(str(tmp_path / "train.py"))
    read, batches = program["read"], program["batches"]
    hosts = [read(f"train-{host}.npz") for host in range(HOSTS)]

    def batches_of(epoch):
        for parts in zip(*(batches(data, epoch) for data in hosts), strict=True):
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: four)
    compressed = in_one_bit["train"](HOSTS, batches_of, read("test.npz"))
    in_one_process = compressed.history.epochs["eval_accuracy"][-1]
    assert in_one_process > 0.9
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints-in-one-bit")
    alone = program["train"](HOSTS, batches_of, read("test.npz"))
    monkeypatch.undo()
    paths = jax.tree.leaves_with_path(alone.state.params)
    expected = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths}
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints-of-one")

    write_program(tmp_path, epochs=3, is_whole=False)
    cut, _ = train_on_hosts(tmp_path)
    assert (tmp_path / "checkpoints" / "30").exists()
    write_program(tmp_path, is_whole=False)
    resumed, accuracy = train_on_hosts(tmp_path)
    assert accuracy == pytest.approx(alone.history.epochs["eval_accuracy"][-1], abs=0.005)
    assert accuracy > 0.9
    for name, leaf in expected.items():
        # Sums of four parts in another order: Adam divides a rounding of small gradients by their size.
        np.testing.assert_allclose(resumed[name], leaf, rtol=0, atol=1e-5, err_msg=name)
        assert np.abs(cut[name] - leaf).max() > 1e-3

    # The program of the page, as it is, on two hosts
    (tmp_path / "checkpoints").rename(tmp_path / "checkpoints-of-two")
    write_program(tmp_path)
    _, accuracy = train_on_hosts(tmp_path)
    assert accuracy == pytest.approx(in_one_process, abs=0.02)
