"""The folder of a run: what is written there, and how a network is rebuilt from it.

- `metrics.jsonl`: a line an epoch (`training.Training.record`), written as training goes on;
- `summary.json`: the result, every flag and hyperparameter, versions;
- `steps.npz`: the loss of each step, and the share of weights moved where the method counts them;
- `curve.png`: accuracies and share moved;
- `checkpoints/` on request: those of `optperm.training.fit`, by their steps, and in `run.json` what
  another run has to have in common with this one to go on from them;
- `permutation.npz` where the method permutes weights, else `params.npz`: the trained network.

The last holds the network's spec (`models.NetworkSpec`), a digest of its trained weights, and for
each parameter "params/<path>" its values or its permutation (`optperm.export_permutation`). Beside
a permutation the initial params are not stored: they are drawn again from the seed.
"""

import dataclasses
import itertools
import json
import math
import pathlib
import shutil
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

import optperm
from optperm.cli import models
from optperm.cli.errors import CliError, UsageError
from optperm.training.processes import digest

METRICS_FILE, CHECKPOINTS, IDENTITY_FILE = "metrics.jsonl", "checkpoints", "run.json"
PERMUTATION_FILE, PARAMS_FILE = "permutation.npz", "params.npz"
_PREFIX = "params/"


def create(out: str | None, name: str) -> pathlib.Path:
    """Makes the folder of a new run, never one that holds something already.

    Args:
      out: The folder to make; None for `runs/<name>`, with -2, -3 and so on where that exists.
      name: Name of the run.

    Raises:
      UsageError: If `out` exists and is not an empty folder.
      CliError: If the folder cannot be made.
    """
    try:
        if out is None:
            return _create_next(pathlib.Path("runs"), name)
        folder = pathlib.Path(out)
        if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UsageError(
                f"--out {out} exists and is not an empty folder. Earlier results are never "
                "overwritten: name another folder, or remove this one."
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / METRICS_FILE).touch()
    except OSError as error:
        raise CliError(f"cannot write to {error.filename}: {error.strerror}.") from error
    return folder


def _create_next(parent: pathlib.Path, name: str) -> pathlib.Path:
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def append_metrics(folder: pathlib.Path, record: dict[str, Any]) -> None:
    """Adds a line to metrics.jsonl."""
    with (folder / METRICS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(_without_nan(record), allow_nan=False) + "\n")


def read_metrics(folder: pathlib.Path, epochs: int) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl up to an epoch."""
    lines = (folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["epoch"] <= epochs]


def write_identity(folder: pathlib.Path, identity: Mapping[str, Any]) -> None:
    """Writes beside the checkpoints what tells their run from others: names and JSON values."""
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    text = json.dumps(identity, indent=2) + "\n"
    (folder / CHECKPOINTS / IDENTITY_FILE).write_text(text, encoding="utf-8")


def find_checkpoint(
    folder: pathlib.Path, epoch: int | None, steps_per_epoch: int, identity: Mapping[str, Any]
) -> int:
    """The step of a checkpoint that a run can go on from.

    Args:
      folder: A run folder.
      epoch: After which epoch; None for the newest checkpoint.
      steps_per_epoch: How many steps make an epoch.
      identity: What tells the run that is to go on from others.

    Raises:
      UsageError: If there is no such epoch, or the checkpoint is of another run.
      CliError: If the folder holds no checkpoints.
    """
    if not (folder / METRICS_FILE).is_file():
        raise CliError(f"--resume {folder}: this is not the folder of a run.")
    kept = sorted(
        int(path.name) for path in folder.glob(f"{CHECKPOINTS}/*") if path.name.isdecimal()
    )
    if not kept:
        raise CliError(
            f"--resume {folder}: this run left no checkpoints. Train with --checkpoint-every."
        )
    there = json.loads((folder / CHECKPOINTS / IDENTITY_FILE).read_text(encoding="utf-8"))
    different = [
        f"{name} is {there.get(name)} there and {fact} here"
        for name, fact in identity.items()
        if there.get(name) != fact
    ]
    if different:
        raise UsageError(
            f"--resume {folder}: the checkpoint is of another run: {'; '.join(different)}. Pass the "
            "flags of that run."
        )
    if epoch is None:
        return kept[-1]
    if epoch * steps_per_epoch not in kept:
        epochs = ", ".join(
            str(step // steps_per_epoch) for step in kept if not step % steps_per_epoch
        )
        raise UsageError(
            f"--from-epoch {epoch}: {folder} holds no checkpoint of that epoch, but of "
            f"{epochs or 'none'}."
        )
    return epoch * steps_per_epoch


def copy_checkpoint(source: pathlib.Path, folder: pathlib.Path, step: int) -> None:
    """Copies a checkpoint to another run folder."""
    shutil.copytree(source / CHECKPOINTS / str(step), folder / CHECKPOINTS / str(step))


def write_draws(folder: pathlib.Path, draws: optax.Params) -> None:
    """Writes draws.npz: arrays (chain, draw, *shape) by the names of the params."""
    arrays: dict[str, Any] = {**optperm.samples_as_dict(draws)}
    np.savez(folder / "draws.npz", **arrays)


def write_summary(folder: pathlib.Path, summary: dict[str, Any]) -> None:
    """Writes summary.json."""
    text = json.dumps(_without_nan(summary), indent=2, allow_nan=False)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for the loss of a run that diverged."""
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_steps(folder: pathlib.Path, **columns: np.ndarray | None) -> None:
    """Writes steps.npz: what was recorded at each step."""
    known: dict[str, Any] = {name: column for name, column in columns.items() if column is not None}
    np.savez_compressed(folder / "steps.npz", **known)


def write_params(folder: pathlib.Path, spec: models.NetworkSpec, trained: optax.Params) -> None:
    """Writes params.npz."""
    _write_network(folder / PARAMS_FILE, spec, trained, trained)


def write_permutation(
    folder: pathlib.Path,
    spec: models.NetworkSpec,
    initial: optax.Params,
    trained: optax.Params,
    opt_state: Any,
) -> None:
    """Writes permutation.npz, if it takes the initial params to the trained ones bit for bit.

    Raises:
      CliError: If it does not.
    """
    permutation = optperm.export_permutation(initial, opt_state, trained)
    if digest(optperm.apply_permutation(initial, permutation)) != digest(trained):
        raise CliError(
            "the permutation does not give the trained weights, so it was not saved: this is a bug "
            "in optperm, please report it."
        )
    _write_network(folder / PERMUTATION_FILE, spec, permutation, trained)


def rebuild(folder: pathlib.Path) -> tuple[models.NetworkSpec, optax.Params]:
    """Rebuilds the trained network of a run, bit for bit.

    Args:
      folder: A run folder; only its permutation.npz or params.npz is read.

    Returns:
      The network's spec, for `models.build`, and its trained params.

    Raises:
      CliError: If the folder holds no such file, or the weights cannot be rebuilt from it.
    """
    files = [folder / name for name in (PERMUTATION_FILE, PARAMS_FILE)]
    path = next((file for file in files if file.is_file()), None)
    if path is None:
        raise CliError(
            f"{folder} holds no trained network, neither {PERMUTATION_FILE} nor {PARAMS_FILE}. "
            "Pass the folder of a run that `optperm train` has finished."
        )
    try:
        spec, leaves, expected = _read_network(path)
        if path.name == PERMUTATION_FILE:
            leaves = optperm.apply_permutation(models.initial_params(spec), leaves)
    except (ValueError, TypeError, KeyError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise CliError(f"{path} is damaged or was not written by optperm ({error}).") from error
    if digest(leaves) != expected:
        raise CliError(
            f"{path} gives other weights here than those that were trained: the file is damaged, "
            "or other versions of JAX and Flax, or another kind of device, draw other initial "
            "params. summary.json says what the run was trained with."
        )
    return spec, leaves


def read_summary(folder: pathlib.Path) -> dict[str, Any]:
    """Reads summary.json.

    Raises:
      CliError: If there is none, or it is not the summary of a run.
    """
    path = folder / "summary.json"
    try:
        summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        missing = {"data", "test_accuracy"} - set(summary)
    except (OSError, ValueError, TypeError) as error:
        raise CliError(f"{path} cannot be read ({error}).") from error
    if missing:
        raise CliError(f"{path} is not the summary of a run: it lacks {', '.join(missing)}.")
    return summary


def _write_network(
    path: pathlib.Path, spec: models.NetworkSpec, leaves: Any, trained: optax.Params
) -> None:
    arrays: dict[str, Any] = {_PREFIX + name: leaf for name, leaf in _flat(leaves).items()}
    np.savez_compressed(path, digest=digest(trained), **dataclasses.asdict(spec), **arrays)


def _read_network(path: pathlib.Path) -> tuple[models.NetworkSpec, Any, str]:
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        spec = models.NetworkSpec(
            model=str(file["model"]),
            hidden=int(file["hidden"]),
            input_shape=tuple(int(size) for size in file["input_shape"]),
            num_classes=int(file["num_classes"]),
            seed=int(file["seed"]),
        )
        leaves = {
            name.removeprefix(_PREFIX): file[name] for name in file if name.startswith(_PREFIX)
        }
        return spec, _nested(leaves), str(file["digest"])


def _flat(params: Any) -> dict[str, np.ndarray]:
    flat = flatten_dict(params, sep="/")
    return {name: np.asarray(leaf) for name, leaf in flat.items()}


def _nested(leaves: dict[str, np.ndarray]) -> optax.Params:
    return unflatten_dict(leaves, sep="/")
