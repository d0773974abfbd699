"""Checkpoints of a run: `checkpoints/<epoch>` in its folder, each all that it takes to go on from there.

A checkpoint is one of Orbax with two items: `state`, the params and the optimizer state (of each
replica, where they differ), and `run`, as JSON what tells the run from others, the digest of the state,
and the metrics so far. Orbax writes it under another name and renames it at the end: a run that dies
meanwhile leaves the checkpoints before it as they were.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from optperm.cli import run_folder
from optperm.cli.errors import CliError, UsageError, differences, import_extra
from optperm.cli.replicas import Replicas
from optperm.cli.training import EpochRecord, Progress

_FOLDER = "checkpoints"


def write(folder: pathlib.Path, facts: Mapping[str, Any], progress: Progress) -> None:
    """Writes the checkpoint of an epoch. To be called in process 0.

    Args:
      folder: The run's.
      facts: What tells the run from others: names and JSON values.
      progress: How far it has come.

    Raises:
      CliError: If it cannot be written.
    """
    run = {
        "facts": dict(facts),
        "digest": run_folder.digest(progress.carry),
        "history": _history(progress),
    }
    path = folder.absolute() / _FOLDER / str(progress.epoch)
    path.parent.mkdir(exist_ok=True)
    with _orbax() as (checkpointer, args):
        try:
            items = {"state": args.StandardSave(progress.carry), "run": args.JsonSave(run)}
            checkpointer.save(path, args=args.Composite(**items))
        except (ValueError, RuntimeError) as error:
            raise CliError(f"cannot write {path} ({error}).") from error


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
    kept = sorted(
        int(path.name)
        for path in (folder / _FOLDER).glob("*")
        if path.name.isdecimal() and path.is_dir()
    )
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
    if which := differences(_read(path, None)["run"]["facts"], facts, "here"):
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
    items = _read(path, like.carry)
    if run_folder.digest(items["state"]) != items["run"]["digest"]:
        raise CliError(_damaged(path, "its state is not what was written"))
    return _with_history(items["state"], items["run"]["history"])


def share(group: Replicas, progress: Progress | None, like: Progress) -> Progress:
    """Brings the progress of process 0 to every process; in the others it is ignored."""
    leaves, structure = jax.tree.flatten(like.carry)
    if group.num_processes == 1 and progress is not None:
        return progress
    history, state = b"", b""
    if progress is not None:
        history = json.dumps(_history(progress)).encode()
        state = b"".join(leaf.tobytes() for leaf in jax.tree.leaves(progress.carry))
    history, state = group.from_main(history), group.from_main(state)
    starts = np.cumsum([0, *(leaf.nbytes for leaf in leaves)])
    parts = [
        np.frombuffer(state, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    return _with_history(jax.tree.unflatten(structure, parts), json.loads(history))


def _read(path: pathlib.Path, like: Any) -> dict[str, Any]:
    """The items of a checkpoint; without its state where nothing tells its form."""
    with _orbax() as (checkpointer, args):
        items = {"run": args.JsonRestore()}
        if like is not None:
            items["state"] = args.StandardRestore(like)
        try:
            restored = checkpointer.restore(path, args=args.Composite(**items))
            missing = {"facts", "digest", "history"} - set(restored["run"])
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            raise CliError(_damaged(path, error)) from error
    if missing:
        raise CliError(_damaged(path, f"it lacks {', '.join(missing)}"))
    return dict(restored.items())


def _damaged(path: pathlib.Path, why: object) -> str:
    return (
        f"{path} is damaged or was not written by this version of optperm ({why}). "
        "Go on from another one with --from-epoch."
    )


def _history(progress: Progress) -> dict[str, Any]:
    return {
        "records": [dataclasses.asdict(record) for record in progress.records],
        "metrics": [
            {name: column.tolist() for name, column in of_epoch.items()}
            for of_epoch in progress.metrics
        ],
    }


def _with_history(carry: Any, history: Mapping[str, Any]) -> Progress:
    return Progress(
        carry,
        [EpochRecord(**record) for record in history["records"]],
        [
            {name: np.asarray(column, np.float32) for name, column in of_epoch.items()}
            for of_epoch in history["metrics"]
        ],
    )


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """A checkpointer of process 0 alone, and the module of its arguments."""
    ocp = import_extra("orbax.checkpoint")
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="optperm"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield checkpointer, ocp.args
