"""Checkpoints by Orbax's manager: each holds all that it takes to go on from there.

Its items are `state`, the arrays of the carry, and `best`, those of the best row with `keep_best`;
`history`, the rows of the steps as one float32 array; and `run`, as JSON all else. Orbax writes a
checkpoint under another name and renames it at the end: a run that dies meanwhile leaves the others.
"""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from optperm.contract.extras import import_optional

_DROPPED = ".dropped"
_ADVICE = "was not written by this version of optperm; resume=STEP takes another"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or not be read.

    Attributes:
      result: What `fit` would have returned, where it had trained by then, else None.
    """

    result: Any = None


class Checkpoints:
    """The checkpoints of one run in a folder, by the arguments of `fit`."""

    def __init__(self, where: Any, keep: int | None) -> None:
        what: Any = {"needed_by": "A checkpoint", "install": "optperm[training]"}
        self._ocp = ocp = import_optional("orbax.checkpoint", **what)
        if not isinstance(where, str | os.PathLike):
            raise TypeError(f"checkpoints must be a folder, got {type(where).__name__}.")
        if set(str(where)) & {*"*?[]"}:  # Orbax takes them for a pattern, and loses what it writes
            raise ValueError(f"checkpoints must be a folder without *, ?, [ and ], got {where}.")
        self._last_kept = math.inf
        with _errors(f"cannot write checkpoints to {where}"):
            path = import_optional("etils.epath", **what).Path(where)
            self.folder = path if "://" in str(where) else path.absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            # One that is dropped is renamed first, so that what is left is whole at any moment.
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, todelete_subdir=_DROPPED)
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def choose(self, resume: bool | int) -> int | None:
        """Return the step of the checkpoint from which a run is to go on; None for none."""
        known = sorted(self._manager.all_steps())
        names = ", ".join(map(str, known)) or "none at all"
        if resume is False and any(known):
            raise ValueError(
                f"{self.folder} holds checkpoints of an earlier run (after steps {names}). Pass "
                "resume=True to go on from it, or another folder."
            )
        if resume is False or (resume is True and not known):
            return None
        if resume is not True and resume not in known:
            says = f"{self.folder} has none after that step, but after {names}"
            raise ValueError(f"resume={resume}: {says}.")
        return known[-1] if resume is True else int(resume)

    def read(self, step: int, facts: Mapping[str, Any]) -> dict[str, Any]:
        """What `write` wrote of the run after a step; a ValueError if its facts are others."""
        path, args = self.folder / str(step), self._ocp.args
        with _errors(f"{path} is damaged or {_ADVICE}"):
            run = self._manager.restore(step, args=args.Composite(run=args.JsonRestore())).run
        if which := differences(run["facts"], json.loads(json.dumps(facts))):
            advice = "Pass what that run was started with, or another folder"
            raise ValueError(f"The checkpoint {path} is of another run: {which}. {advice}.")
        return dict(run)

    def read_arrays(self, step: int, like: Mapping[str, Any]) -> tuple[Any, np.ndarray]:
        """Trees by name, placed like others, and the rows; what came later will be dropped."""
        restore = self._ocp.args.StandardRestore
        forms = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, dict(like))
        trees = {name: restore(tree) for name, tree in forms.items()}
        items = self._ocp.args.Composite(**trees, history=restore())
        with _errors(f"{self.folder / str(step)} is damaged or {_ADVICE}"):
            arrays = self._manager.restore(step, args=items)
        self._last_kept = step
        return arrays, np.asarray(arrays.history["steps"])

    def write(
        self, step: int, trees: Mapping[str, Any], rows: np.ndarray, run: dict[str, Any]
    ) -> None:
        """Write the checkpoint of a step, unless there is one. To be called in all processes.

        `rows` are the metrics of all steps, float32 (metrics, steps); among the JSON values of `run`
        are `facts`, which tell it from others. Nothing of it may change while it is written.
        """
        if step == self._last_kept:  # nothing has come of it yet
            return
        save = self._ocp.args.StandardSave
        items = {name: save(tree) for name, tree in trees.items()}
        items["history"] = save({"steps": rows})
        args = self._ocp.args.Composite(**items, run=self._ocp.args.JsonSave(run))
        with _errors(f"cannot write {self.folder / str(step)}"):
            for later in [each for each in self._manager.all_steps() if each > self._last_kept]:
                self._manager.delete(later)
            self._last_kept = math.inf
            self._wait()
            if step not in self._manager.all_steps():
                self._manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Waits until all is written."""
        with _errors(f"cannot write to {self.folder}"):
            self._wait()
            self._manager.check_for_errors()
            self._manager.close()

    def _wait(self) -> None:
        self._manager.wait_until_finished()
        if jax.process_index() == 0:
            (self.folder / _DROPPED).rmtree(missing_ok=True)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Which facts of a run are others there than here, by name."""
    which = {name: (there.get(name), fact) for name, fact in here.items()}
    return "; ".join(f"{k} is {a} there and {b} here" for k, (a, b) in which.items() if a != b)


@contextlib.contextmanager
def _errors(says: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each file system has its own, and each kind of damage
        raise CheckpointError(f"{says} ({type(error).__name__}: {error}).") from error
