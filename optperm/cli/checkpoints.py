"""Checkpoints of a run: `checkpoints/<epoch>` in its folder (`optperm.training.checkpoints`).

Their state is the params and the optimizer state.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from optperm.cli import run_folder
from optperm.cli.errors import CliError, UsageError
from optperm.cli.training import EpochRecord, Progress
from optperm.training import checkpoints
from optperm.training.checkpoints import CheckpointError, Kept
from optperm.training.replicas import Replicas

_FOLDER = "checkpoints"
_ADVICE = "Go on from another one with --from-epoch."


def write(folder: pathlib.Path, facts: Mapping[str, Any], progress: Progress) -> None:
    """Writes the checkpoint of an epoch. To be called in process 0.

    Args:
      folder: The run's.
      facts: What tells the run from others: names and JSON values.
      progress: How far it has come.

    Raises:
      CliError: If it cannot be written.
    """
    try:
        checkpoints.write(folder / _FOLDER / str(progress.epoch), facts, _kept(progress))
    except CheckpointError as error:
        raise CliError(str(error)) from error


def find(folder: pathlib.Path, epoch: int | None, facts: Mapping[str, Any]) -> pathlib.Path:
    """The checkpoint of an epoch, if it is one of this run. To be called in process 0.

    Args:
      folder: A run folder.
      epoch: After which epoch; None for the newest.
      facts: What tells the run from others.

    Raises:
      UsageError: If there is no such epoch, or the checkpoint is of another run.
      CliError: If the folder holds no checkpoints, or this one is damaged.
    """
    if not (folder / run_folder.METRICS_FILE).is_file():
        raise CliError(f"--resume {folder}: this is not the folder of a run.")
    kept = checkpoints.numbers(folder / _FOLDER)
    if not kept:
        raise CliError(
            f"--resume {folder}: this run left no checkpoints. Train with --checkpoint-every."
        )
    if epoch is not None and epoch not in kept:
        raise UsageError(
            f"--from-epoch {epoch}: {folder} holds no checkpoint of that epoch, but of "
            f"{', '.join(map(str, kept))}."
        )
    path = folder.absolute() / _FOLDER / str(kept[-1] if epoch is None else epoch)
    try:
        there = checkpoints.facts_of(path, advice=_ADVICE)
    except CheckpointError as error:
        raise CliError(str(error)) from error
    if which := checkpoints.differences(there, facts, "here"):
        raise UsageError(
            f"--resume {folder}: the checkpoint is of another run: {which}. Pass the flags of that run."
        )
    return path


def read(path: pathlib.Path, like: Progress) -> Progress:
    """Reads a checkpoint. To be called in process 0.

    Args:
      path: As `find` gave it.
      like: A progress of the same run, for the form of its state.

    Raises:
      CliError: If it is damaged.
    """
    try:
        return _progress(checkpoints.read(path, like.carry, advice=_ADVICE))
    except CheckpointError as error:
        raise CliError(str(error)) from error


def share(group: Replicas, progress: Progress | None, like: Progress) -> Progress:
    """Brings the progress of process 0 to every process; in the others it is ignored."""
    kept = None if progress is None else _kept(progress)
    return _progress(checkpoints.share(group, kept, like.carry))


def _kept(progress: Progress) -> Kept:
    history = {
        "records": [dataclasses.asdict(record) for record in progress.records],
        "metrics": [
            {name: column.tolist() for name, column in of_epoch.items()}
            for of_epoch in progress.metrics
        ],
    }
    return Kept(progress.carry, history)


def _progress(kept: Kept) -> Progress:
    return Progress(
        kept.state,
        [EpochRecord(**record) for record in kept.history["records"]],
        [
            {name: np.asarray(column, np.float32) for name, column in of_epoch.items()}
            for of_epoch in kept.history["metrics"]
        ],
    )
