"""Checkpoints with Orbax's manager. Each checkpoint contains everything that a run needs to resume.

The items of a checkpoint are `state`, the arrays of the carry; `best`, the arrays of the best row with
`keep_best`; `history`, the rows of the steps as one float32 array; and `run`, everything else as JSON.
Orbax writes a checkpoint under a temporary name and then renames it, so if a run dies while writing, the
earlier checkpoints stay intact.
"""

import contextlib
import dataclasses
import json
import math
import operator
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np

from optperm.core import checks
from optperm.core.fingerprints import compare_fingerprints
from optperm.core.optional import import_optional
from optperm.training import _processes as processes

_DROPPED = ".dropped"
_MOST_NAMED = 3  # differing arrays in a message
_LONGEST = 300  # characters of an error of Orbax, which may quote its whole configuration
_DAMAGED = "is damaged or was not written by this version of optperm"
# The time in which a file of one process must appear to the others. Network file systems may be late.
_PATIENCE = 10.0


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written or read.

    Attributes:
      result: The `FitResult` of the training before the error; None if there was none.
      unread: The step of the checkpoint that cannot be read; None for other errors.
    """

    result: Any = None
    unread: int | None = None


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """The folder for the checkpoints of one run of `fit`, and what happens at a signal.

    `fit` also writes a checkpoint when training ends, even if a callback, the data or the loss function
    raises an error, but not after a second Ctrl-C. At each step, `fit` first adds the row, then calls
    the callbacks, then writes the checkpoint. A resumed run first does the tasks that a signal cut off.
    On the same devices, it ends with the same bits as an uninterrupted run. With another number of
    replicas, the replicas take the saved states in turn.

    Attributes:
      folder: The folder, in which checkpoints are named by their steps, on any file system that
        `etils.epath` supports, such as `gs://`. All processes need the same folder.
      every: The number of steps between checkpoints.
      keep: The number of newest checkpoints to keep; None keeps all.
      resume: If True, resume from the newest checkpoint, if there is one. A number resumes from the
        checkpoint of this step, and the next checkpoint replaces all later ones. Pass a new iterator as
        data: `fit` drops the used batches, or restores the state of an iterator that has a state. `fit`
        compares the arrays, and the arguments that shape the optimizer state, with the earlier run, but
        not loss functions and other hyperparameters. Hyperparameters in the state come from the earlier
        run (`optax.inject_hyperparams`), and all others from this run.
      on_signal: The reaction to Ctrl-C or SIGTERM, after the last checkpoint. `"raise"` prints a line to
        stderr and sends the signal again, which ends a program that does not handle the signal.
        `"return"` returns the result, for a program that checks `result.ended`.

    Example:
      >>> from optperm.training import Checkpoints
      >>> checkpoints = Checkpoints("runs/1", every=1000, keep=2, resume=True)
      >>> # fit(..., checkpoints=checkpoints)
    """

    folder: Any
    _: dataclasses.KW_ONLY
    every: int | None = None
    keep: int | None = None
    resume: bool | int = False
    on_signal: Literal["raise", "return"] = "raise"

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            if getattr(self, name) is not None:
                checks.check_count(f"Checkpoints.{name}", getattr(self, name))
        if not isinstance(self.resume, bool):
            name = "Checkpoints.resume, unless True or False,"
            checks.check_count(name, self.resume, minimum=0)
        checks.check_choice("Checkpoints.on_signal", self.on_signal, ("raise", "return"))


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What determines how the arrays of a carry are read.

    Attributes:
      arrays: The dtype and shape of each array, by its path.
      arguments: The fingerprints of the optimizer's states (`core.fingerprints.list_fingerprints`).
    """

    arrays: dict[str, str]
    arguments: list[dict[str, list[int]]]

    def check(self, here: "Shapes", path: Any) -> None:
        """Raise a ValueError that names what differs between these saved shapes and other shapes."""
        if len(self.arguments) == len(here.arguments):
            for name in compare_fingerprints(self.arguments, here.arguments):
                raise ValueError(
                    f"The checkpoint {path} was made with another {name}= of the optimizer. Pass the "
                    "value of the earlier run, or another folder."
                )
        paths = dict.fromkeys([*self.arrays, *here.arrays])
        pairs = {
            at: (self.arrays.get(at, "missing"), here.arrays.get(at, "missing")) for at in paths
        }
        which = [f"{at} is {a} there and {b} here" for at, (a, b) in pairs.items() if a != b]
        if which:
            more = f"; and {len(which) - _MOST_NAMED} more" * (len(which) > _MOST_NAMED)
            says = "; ".join(which[:_MOST_NAMED])
            raise ValueError(
                f"The checkpoint {path} belongs to another optimizer or model: {says}{more}."
            )


class Folder:
    """The checkpoints of one run in a folder."""

    def __init__(self, given: Checkpoints) -> None:
        where = given.folder
        what: Any = {"needed_by": "A checkpoint", "install": "optperm[training]"}
        self._ocp = ocp = import_optional("orbax.checkpoint", **what)
        if set(str(where)) & {*"*?[]"}:  # Orbax would read a pattern, and lose checkpoints
            raise ValueError(
                f"Checkpoints.folder must be a folder without *, ?, [ or ], got {where}."
            )
        self._last_kept = math.inf
        self._written: int | None = (
            None  # the step of the last checkpoint, which may still be written
        )
        cannot = f"cannot write checkpoints to {where}"
        names = processes.gather_texts(f".trial-{jax.process_index()}-{os.getpid()}")
        with processes.together(), _errors(cannot):
            path = import_optional("etils.epath", **what).Path(where).expanduser()
            self.folder = path if "://" in str(where) else path.absolute()
            self.folder.mkdir(parents=True, exist_ok=True)
            # An existing folder may belong to another user, or may be on a read-only file system.
            trial = self.folder / names[jax.process_index()]
            trial.write_text("")
        try:
            self._check_is_shared(names)
        finally:
            with contextlib.suppress(OSError):
                trial.unlink()
        with processes.together(), _errors(cannot):
            # Orbax renames a checkpoint before deleting it, so no checkpoint is ever partly deleted.
            options = ocp.CheckpointManagerOptions(max_to_keep=given.keep, todelete_subdir=_DROPPED)
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def _check_is_shared(self, names: list[str]) -> None:
        """Raise in all processes unless each process sees the trial files of all processes."""
        deadline = time.monotonic() + _PATIENCE
        while not all(seen := [self._sees(name) for name in names]):
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # Row i has what process i sees.
        for here, row in enumerate(processes.gather(np.array(seen))):
            if not row.all():
                there = int(np.argmin(row))
                raise CheckpointError(
                    f"Process {here} does not see what process {there} writes to {self.folder}: all "
                    "processes need the same folder, on a file system that they share."
                )

    def _sees(self, name: str) -> bool:
        try:
            return bool((self.folder / name).exists())
        except OSError:
            return False

    def choose(self, resume: bool | int) -> int | None:
        """Return the step of the checkpoint from which a run resumes, or None."""
        known = sorted(self._manager.all_steps())
        found = [json.loads(text) for text in processes.gather_texts(json.dumps(known))]
        if any(each != known for each in found):
            which = "; ".join(f"process {i} sees {each}" for i, each in enumerate(found))
            raise CheckpointError(
                f"The processes see different checkpoints in {self.folder} ({which}): all processes "
                "need the same folder, on a file system that they share."
            )
        if resume is False and any(known):
            says = f"{self.folder} contains checkpoints of an earlier run ({known})"
            raise ValueError(f"{says}: pass resume=True, or another folder.")
        if isinstance(resume, bool):
            return known[-1] if resume and known else None
        if (step := operator.index(resume)) not in known:
            has = f"has checkpoints of steps {known}" if known else "has no checkpoints"
            raise ValueError(f"resume={resume}, but {self.folder} {has}.")
        return step

    def read(self, step: int, facts: Mapping[str, Any], shapes: "Shapes") -> dict[str, Any]:
        """Read the `run` of a step's checkpoint; raise a ValueError if its facts or shapes differ."""
        path, args = self.folder / str(step), self._ocp.args
        with self._reading(step):
            run = self._manager.restore(step, args=args.Composite(run=args.JsonRestore())).run
        if which := describe_differences(run["facts"], json.loads(json.dumps(facts))):
            raise ValueError(f"The checkpoint {path} belongs to another run: {which}.")
        Shapes(**run["shapes"]).check(shapes, path)
        return dict(run)

    def read_arrays(self, step: int, like: Mapping[str, Any]) -> tuple[Any, np.ndarray]:
        """Read trees, placed like `like`, and the rows; `write` then deletes later checkpoints."""
        restore = self._ocp.args.StandardRestore
        forms = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, dict(like))
        trees = {name: restore(tree) for name, tree in forms.items()}
        items = self._ocp.args.Composite(**trees, history=restore())
        with self._reading(step):
            arrays = self._manager.restore(step, args=items)
        self._last_kept = step
        return arrays, np.asarray(arrays.history["steps"])

    def write(
        self, step: int, trees: Mapping[str, Any], rows: np.ndarray, run: dict[str, Any]
    ) -> None:
        """Write a step's checkpoint, unless it exists already. All processes must call this method.

        `rows` are the metrics of all steps, float32 (metrics, steps). `run` contains JSON values, whose
        `facts` identify the run. Arguments must not change while Orbax writes in the background.
        """
        if step == self._last_kept:  # the resumed run has not taken a step
            return
        save = self._ocp.args.StandardSave
        items = {name: save(tree) for name, tree in trees.items()}
        items["history"] = save({"steps": rows})
        args = self._ocp.args.Composite(**items, run=self._ocp.args.JsonSave(run))
        self._wait()
        with _errors(f"cannot write {self.folder / str(step)}"):
            # Delete later checkpoints of the old branch only when the new branch has its own checkpoint.
            for later in [each for each in self._manager.all_steps() if each > self._last_kept]:
                self._manager.delete(later)
            self._last_kept = math.inf
            if step not in self._manager.all_steps():
                self._written = step
                self._manager.save(step, args=args, force=True)

    def close(self) -> None:
        """Wait until all checkpoints are written, and close the manager."""
        self._wait()
        with _errors(f"cannot write to {self.folder}"):
            self._manager.close()

    def _wait(self) -> None:
        """Wait until the last checkpoint is written; an error in the background belongs to its step."""
        which = self.folder if self._written is None else self.folder / str(self._written)
        with _errors(f"cannot write {which}"):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        with _errors(f"cannot write to {self.folder}"):
            if jax.process_index() == 0:
                (self.folder / _DROPPED).rmtree(missing_ok=True)

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Raise errors with the steps of the other checkpoints."""
        try:
            with _errors(f"{self.folder / str(step)} {_DAMAGED}"):
                yield
        except CheckpointError as error:
            others = sorted(set(self._manager.all_steps()) - {step})
            advice = f" Pass resume=STEP for another checkpoint, of the steps {others}."
            error.args = (str(error) + advice * bool(others),)
            error.unread = step
            raise


def describe_differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Return the facts of a run that differ, with both values; empty if all facts agree."""
    which = {name: (there.get(name), fact) for name, fact in here.items()}
    return "; ".join(f"{k} is {a} there and {b} here" for k, (a, b) in which.items() if a != b)


@contextlib.contextmanager
def _errors(says: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # file systems and kinds of damage have different error types
        why = str(error).strip().partition("\n")[0]
        if len(why) > _LONGEST:  # the cause, such as a full disk, is often at the end
            why = f"{why[: _LONGEST // 2]} ... {why[-_LONGEST // 2 :]}"
        raise CheckpointError(f"{says} ({type(error).__name__}: {why}).") from error
