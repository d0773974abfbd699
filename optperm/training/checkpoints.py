"""Checkpoints: folders named by a number, each all that it takes to go on from there.

A checkpoint is one of Orbax with two items: `state`, the arrays (of each replica, where they differ),
and `run`, as JSON what tells the run from others, the digest of the state, and the history so far.
Orbax writes it under another name and renames it at the end: a run that dies meanwhile leaves the
checkpoints before it as they were.
"""

import contextlib
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from optperm.training.extras import import_optional
from optperm.training.replicas import Replicas


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or not be read."""


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a checkpoint holds.

    Attributes:
      state: A tree of NumPy arrays.
      history: JSON values.
    """

    state: Any
    history: dict[str, Any]


def write(path: pathlib.Path, facts: Mapping[str, Any], kept: Kept) -> None:
    """Writes a checkpoint. To be called in process 0.

    Args:
      path: Its folder, named by a number.
      facts: What tells the run from others: names and JSON values.
      kept: What it is to hold.

    Raises:
      CheckpointError: If it cannot be written.
    """
    run = {"facts": dict(facts), "digest": digest(kept.state), "history": kept.history}
    path.parent.mkdir(parents=True, exist_ok=True)
    with _orbax() as (checkpointer, args):
        try:
            items = {"state": args.StandardSave(kept.state), "run": args.JsonSave(run)}
            checkpointer.save(path.absolute(), args=args.Composite(**items))
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(f"cannot write {path} ({error}).") from error


def numbers(folder: pathlib.Path) -> list[int]:
    """The numbers of the checkpoints in a folder, in order."""
    paths = [path for path in folder.glob("*") if path.name.isdecimal() and path.is_dir()]
    return sorted(int(path.name) for path in paths)


def facts_of(path: pathlib.Path, *, advice: str) -> dict[str, Any]:
    """What tells the run of a checkpoint from others.

    Raises:
      CheckpointError: If it is damaged, with the advice.
    """
    facts: dict[str, Any] = _read(path, None, advice)["run"]["facts"]
    return facts


def read(path: pathlib.Path, like: Any, *, advice: str) -> Kept:
    """Reads a checkpoint. To be called in process 0.

    Args:
      path: Its folder.
      like: A state of the same form.
      advice: What to do where it is damaged, for the message.

    Raises:
      CheckpointError: If it is damaged.
    """
    items = _read(path, like, advice)
    if digest(items["state"]) != items["run"]["digest"]:
        raise _damaged(path, "its state is not what was written", advice)
    return Kept(items["state"], items["run"]["history"])


def share(replicas: Replicas, kept: Kept | None, like: Any) -> Kept:
    """Brings what process 0 has read to every process; in the others it is ignored."""
    leaves, structure = jax.tree.flatten(like)
    if replicas.num_processes == 1 and kept is not None:
        return kept
    history, state = b"", b""
    if kept is not None:
        history = json.dumps(kept.history).encode()
        state = b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(kept.state))
    history, state = replicas.from_main(history), replicas.from_main(state)
    starts = np.cumsum([0, *(leaf.nbytes for leaf in leaves)])
    parts = [
        np.frombuffer(state, leaf.dtype, leaf.size, start).reshape(leaf.shape)
        for leaf, start in zip(leaves, starts[:-1], strict=True)
    ]
    return Kept(jax.tree.unflatten(structure, parts), json.loads(history))


def digest(tree: Any) -> str:
    """Tells whether two trees of arrays hold the same bits under the same names."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    hashed = hashlib.sha256()
    for name, (_, leaf) in sorted(zip(names, leaves, strict=True), key=lambda pair: pair[0]):
        hashed.update(name.encode())
        hashed.update(np.asarray(leaf).tobytes())
    return hashed.hexdigest()


def differences(there: Mapping[str, Any], facts: Mapping[str, Any], here: str) -> str:
    """Names what is not as it is here, for a message; empty where all is."""
    return "; ".join(
        f"{name} is {there.get(name)} there and {fact} {here}"
        for name, fact in facts.items()
        if there.get(name) != fact
    )


def require() -> None:
    """Imports Orbax, to fail before training rather than after it.

    Raises:
      ImportError: If it is missing, with what to install.
    """
    _checkpoint_module()


def _read(path: pathlib.Path, like: Any, advice: str) -> dict[str, Any]:
    """The items of a checkpoint; without its state where nothing tells its form."""
    failures: tuple[type[Exception], ...] = (
        ValueError,
        TypeError,
        KeyError,
        OSError,
        RuntimeError,
    )
    with _orbax() as (checkpointer, args):
        items = {"run": args.JsonRestore()}
        if like is not None:
            items["state"] = args.StandardRestore(like)
        try:
            restored = checkpointer.restore(path.absolute(), args=args.Composite(**items))
            missing = {"facts", "digest", "history"} - set(restored["run"])
        except failures as error:
            raise _damaged(path, error, advice) from error
    if missing:
        raise _damaged(path, f"it lacks {', '.join(missing)}", advice)
    return dict(restored.items())


def _damaged(path: pathlib.Path, why: object, advice: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is damaged or was not written by this version of optperm ({why}). {advice}"
    )


def _checkpoint_module() -> Any:
    return import_optional(
        "orbax.checkpoint", needed_by="A checkpoint", install="optperm[training]"
    )


@contextlib.contextmanager
def _orbax() -> Iterator[tuple[Any, Any]]:
    """A checkpointer of process 0 alone, and the module of its arguments."""
    ocp = _checkpoint_module()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=0, active_processes={0}, barrier_sync_key_prefix="optperm"
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        yield checkpointer, ocp.args
