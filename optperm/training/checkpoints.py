"""Checkpoints by Orbax's manager: each holds all that it takes to go on from there.

Its items are `state`, the arrays of the carry, each written by the processes that have it; `history`, the
rows of the steps as one float32 array; and `run`, as JSON the rest: what tells the run from others, the
position, the rows of the epochs, and where an iterator of batches has come. Orbax writes a checkpoint under
another name and renames it at the end, so that a run that dies meanwhile leaves the others as they were.
"""

import dataclasses
import json
import os
import uuid
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from optperm.contract import checks
from optperm.training import processes
from optperm.training.extras import import_optional
from optperm.training.history import History

_EVERYTHING = 2**31


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or not be read.

    Attributes:
      result: Where training was over, what `fit` would have returned, else None.
    """

    result: Any = None


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a checkpoint holds.

    Attributes:
      carry: The arrays, random keys as plain ones.
      position: The fields of a position, JSON values.
      seconds: Wall time since the last row of an epoch.
      history: All rows so far.
      iterator: Where the iterator of batches has come, if it can say so.
    """

    carry: Any
    position: dict[str, int]
    seconds: float
    history: History
    iterator: str | None


class Checkpoints:
    """The checkpoints of one run.

    Args:
      where: A folder, or an `orbax.checkpoint.CheckpointManager`.
      every: After how many steps each to write one into a folder, beside the last; None for that alone.
      keep: How many of the newest to keep in a folder; None for all.

    Raises:
      TypeError: If `where` is neither.
      ValueError: If `every` or `keep` come with a manager.
      CheckpointError: If nothing can be written there.
      ImportError: If Orbax is missing, with what to install.
    """

    def __init__(self, where: Any, every: int | None, keep: int | None) -> None:
        self._ocp = import_optional(
            "orbax.checkpoint", needed_by="A checkpoint", install="optperm[training]"
        )
        self._is_ours = isinstance(where, str | os.PathLike)
        self._every, self._dropped = every, _EVERYTHING
        if isinstance(where, self._ocp.CheckpointManager):
            for name, value in {"checkpoint_every": every, "checkpoint_keep": keep}.items():
                if value is not None:
                    raise ValueError(
                        f"{name} is for a folder: an orbax.checkpoint.CheckpointManager has its own "
                        "CheckpointManagerOptions(save_interval_steps=, max_to_keep=)."
                    )
            self._manager = where
        elif not self._is_ours:
            raise TypeError(
                "checkpoints must be a folder or an orbax.checkpoint.CheckpointManager, got "
                f"{type(where).__name__}."
            )
        else:
            self._manager = self._open(where, keep)
        self.folder = self._manager.directory

    def _open(self, where: Any, keep: int | None) -> Any:
        epath = import_optional("etils.epath", needed_by="A checkpoint", install="etils[epath]")
        try:
            folder = epath.Path(where)
            if "://" not in str(where):
                folder = epath.Path(os.path.abspath(folder))
            folder.mkdir(parents=True, exist_ok=True)
            # What cannot be written is found now, rather than when training is over.
            probe = folder / f".writable-{uuid.uuid4().hex}"
            probe.write_text("")
            probe.unlink()
        except Exception as error:  # each file system has its own
            raise CheckpointError(f"cannot write checkpoints to {where} ({error}).") from error
        options = self._ocp.CheckpointManagerOptions(
            max_to_keep=keep, save_interval_steps=self._every or _EVERYTHING
        )
        return self._ocp.CheckpointManager(folder, options=options)

    def choose(self, resume: bool | int, step: int) -> int | None:
        """The step of the checkpoint to go on from; None for none.

        Args:
          resume: As in `fit`.
          step: Where the run stands without one.

        Raises:
          ValueError: If there is none of that step, or there are others that nobody asks for.
        """
        known = sorted(self._manager.all_steps())
        names = ", ".join(map(str, known))
        if resume is False:
            if known and known[-1] > step:
                raise ValueError(
                    f"{self.folder} holds checkpoints of an earlier run (after steps {names}). Pass "
                    "resume=True to go on from it, or another folder."
                )
            return None
        if resume is True:
            return known[-1] if known else None
        if resume not in known:
            raise ValueError(
                f"resume={resume}: {self.folder} holds no checkpoint after that step, but after "
                f"{names or 'none at all'}."
            )
        return int(resume)

    def read(self, step: int, carry: Any, facts: Mapping[str, Any]) -> Kept:
        """Reads the checkpoint of a step, onto the devices on which `carry` lies.

        What was kept after it is dropped before the next one is written.

        Raises:
          ValueError: If it is of another run.
          CheckpointError: If it is damaged.
        """
        args = self._ocp.args
        run = self._restore(step, {"run": args.JsonRestore()})["run"]
        differences = [
            f"{name} is {run['facts'].get(name)} there and {fact} here"
            for name, fact in json.loads(json.dumps(facts)).items()
            if run["facts"].get(name) != fact
        ]
        if differences:
            raise ValueError(
                f"The checkpoint {self.folder / str(step)} is of another run: {'; '.join(differences)}. "
                "Pass what that run was started with, or another folder."
            )
        like = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, carry)
        items = self._restore(
            step, {"state": args.StandardRestore(like), "history": args.StandardRestore()}
        )
        self._dropped = step
        rows = np.asarray(items["history"]["steps"])
        history = History.from_arrays(dict(zip(run["names"], rows, strict=True)), run["epochs"])
        return Kept(items["state"], run["position"], run["seconds"], history, run["iterator"])

    def _restore(self, step: int, items: Mapping[str, Any]) -> Any:
        try:
            return self._manager.restore(step, args=self._ocp.args.Composite(**items))
        except Exception as error:  # whatever a damaged file leads to
            raise CheckpointError(
                f"{self.folder / str(step)} is damaged or was not written by this version of optperm "
                f"({error}). Go on from another one by resume=STEP."
            ) from error

    def until_next(self, step: int, most: int) -> int:
        """In how many steps the next checkpoint is due, if in fewer than `most`; else that."""
        if self._is_ours:
            return most if self._every is None else min(most, self._every - step % self._every)
        self._drop_later()
        due = (n for n in range(1, most) if self._manager.should_save(step + n))
        return next(due, most)

    def is_due(self, step: int) -> bool:
        """Whether one is due after a step."""
        if self._is_ours:
            return self._every is not None and step % self._every == 0
        return bool(self._manager.should_save(step))

    def _drop_later(self) -> None:
        for later in [step for step in self._manager.all_steps() if step > self._dropped]:
            self._manager.delete(later)
        self._dropped = _EVERYTHING

    def write(self, step: int, kept: Kept, facts: Mapping[str, Any]) -> None:
        """Writes the checkpoint of a step, unless there is one. To be called in all processes.

        Raises:
          CheckpointError: If it cannot be written.
        """
        args, columns = self._ocp.args, kept.history.steps
        rows = np.stack(list(columns.values())) if columns else np.zeros((0, 0), np.float32)
        run = {
            "facts": dict(facts),
            "position": kept.position,
            "seconds": kept.seconds,
            "names": list(columns),
            "epochs": kept.history.epoch_rows,
            "iterator": kept.iterator,
        }
        items = {
            "state": args.StandardSave(kept.carry),
            "history": args.StandardSave({"steps": rows}),
            "run": args.JsonSave(run),
        }
        try:
            self._drop_later()
            if step not in self._manager.all_steps():
                last = kept.history.last
                self._manager.save(
                    step, args=args.Composite(**items), metrics=last or None, force=True
                )
        except Exception as error:  # each file system has its own
            raise CheckpointError(f"cannot write {self.folder / str(step)} ({error}).") from error

    def close(self) -> None:
        """Waits until all is written.

        Raises:
          CheckpointError: If that fails.
        """
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            if self._is_ours:
                self._manager.close()
        except Exception as error:  # each file system has its own
            raise CheckpointError(f"cannot write to {self.folder} ({error}).") from error


def check_arguments(where: Any, every: Any, keep: Any, resume: Any) -> None:
    """Raises unless the arguments of `fit` about checkpoints go together."""
    if resume is not True and resume is not False:
        checks.check_count("resume", resume, minimum=0)
    if where is None:
        given = {"checkpoint_every": every, "checkpoint_keep": keep, "resume": resume or None}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} goes with checkpoints: pass a folder as well.")


def form(tree: Any) -> str:
    """A short name of a tree's structure, shapes and dtypes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    text = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in leaves]
    return f"{len(leaves)} arrays, {processes.digest([np.frombuffer(str(text).encode(), np.uint8)])[:8]}"
