"""What happens in one `fit` beside the steps: records, evaluations, callbacks and checkpoints."""

import dataclasses
import hashlib
import pathlib
import shutil
import time
from collections.abc import Callable
from typing import Any

import jax

from optperm.training import checkpoints, engine
from optperm.training.callbacks import Callback, EarlyStopping, Event, wants_to_stop
from optperm.training.evaluations import Evaluator
from optperm.training.feeds import Columns, Feed
from optperm.training.history import History
from optperm.training.progress import Bar, NoBar, line
from optperm.training.subjects import Subject

_GRADIENT_CHUNK = 1000  # examples on a device at once, for a full gradient
# From the optimizer's state, the params and the full gradient, the state to go on with.
Change = Callable[[Any, Any, Any], Any]


class Run:
    """What happens in one `fit`, beside the steps."""

    def __init__(
        self,
        subject: Subject,
        feed: Feed,
        evaluator: Evaluator | None,
        epoch_start: Callable[[int], Change | None] | None,
        batch_end: tuple[Callback, ...],
        epoch_end: tuple[Callback, ...],
    ) -> None:
        self._subject, self._feed, self._evaluator = subject, feed, evaluator
        self._epoch_start, self._batch_end, self._epoch_end = epoch_start, batch_end, epoch_end
        self.history, self.seconds = History(), 0.0
        self.bar: Bar = NoBar()
        self._since = time.perf_counter()

    def hooks(self) -> engine.Hooks:
        """For the loop."""
        self._since = time.perf_counter()
        return engine.Hooks(self._start, self._after_steps, self._after_epoch, self._save)

    def _start(self, at: engine.Position, carry: Any) -> Any:
        change = None if self._epoch_start is None else self._epoch_start(at.epoch)
        if change is None:
            return carry
        if not callable(change):
            raise TypeError(
                "epoch_start must return a function change(opt_state, params, full_gradient), such as "
                f"optperm.take_snapshot, or None, got {change!r}."
            )
        self.bar.show(at.step, f"epoch {at.epoch} full gradient")
        batches = self._feed.all_batches(at.epoch, _GRADIENT_CHUNK)
        return self._subject.changed(carry, change, batches)

    def _after_steps(self, at: engine.Position, carry: Any, columns: Columns) -> bool:
        self._tick()
        self.history.add_steps(columns)
        if not columns:
            return False
        # The epoch that the steps belong to.
        epoch = at.epoch if at.offset else at.epoch - 1
        metrics = {name: float(column[-1]) for name, column in columns.items()}
        self.bar.show(at.step, line(epoch, metrics))
        if not self._batch_end:
            return False
        event = Event(epoch, at.step, metrics, self.history, self._now(carry))
        return wants_to_stop(self._batch_end, event, name="on_batch_end")

    def _after_epoch(self, at: engine.Position, carry: Any) -> bool:
        epoch = at.epoch if at.offset else at.epoch - 1
        self._tick()
        evaluated = {}
        if self._evaluator is not None:
            evaluated = self._evaluator.evaluate(self._subject.trained(carry), epoch)
        self.history.add_epoch(epoch=epoch, step=at.step, seconds=self.seconds, evaluated=evaluated)
        self.seconds, self._since = 0.0, time.perf_counter()
        metrics = {k: v for k, v in self.history.last.items() if k not in ("epoch", "step")}
        self.bar.show(at.step, line(epoch, metrics))
        event = Event(epoch, at.step, metrics, self.history, self._now(carry))
        stop = wants_to_stop(self._epoch_end, event, name="on_epoch_end")
        self._since = time.perf_counter()
        return stop

    def was_stopped(self) -> bool:
        """Whether the run that is gone on with had come to its early end."""
        early = [callback for callback in self._epoch_end if isinstance(callback, EarlyStopping)]
        return bool(self.history.last) and any(each.is_due(self.history) for each in early)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def _now(self, carry: Any) -> Callable[[], Any]:
        return lambda: self._subject.shown(self._subject.trained(carry))

    def keep_in(self, folder: pathlib.Path, keep: int | None, carry: Any) -> None:
        """Says where checkpoints go, and of what form they are."""
        self._folder, self._keep = folder, keep
        self._like = self._subject.gather(carry)
        self._facts = {
            "the kind of model": self._subject.kind,
            "the form of the state": _form(self._like),
            "the number of replicas": self._subject.replicas.size,
            "whether each has its own state": self._subject.own,
            **self._feed.facts(),
        }

    def _save(self, at: engine.Position, carry: Any) -> None:
        self._tick()
        history = {
            "position": dataclasses.asdict(at),
            "seconds": self.seconds,
            "history": self.history.as_json(),
        }
        kept = checkpoints.Kept(self._subject.gather(carry), history)
        self._on_main(self._write, at.step, kept)

    def _write(self, step: int, kept: checkpoints.Kept) -> None:
        path = self._folder / str(step)
        if path.exists():  # gone on from there with nothing left to do
            return
        checkpoints.write(path, self._facts, kept)
        if self._keep is not None:
            for old in checkpoints.numbers(self._folder)[: -self._keep]:
                shutil.rmtree(self._folder / str(old))

    def find(self, resume: bool | int, at: engine.Position, carry: Any) -> Any:
        """The checkpoint to go on from, if any, in every process."""
        path = self._on_main(self._choose, resume, at.step)
        if not self._subject.replicas.any(path is not None):
            return None
        read = self._on_main(self._read, path)
        return checkpoints.share(self._subject.replicas, read, self._like)

    def _read(self, path: pathlib.Path) -> checkpoints.Kept:
        return checkpoints.read(path, self._like, advice="Go on from another one by resume=STEP.")

    def _choose(self, resume: bool | int, step: int) -> pathlib.Path | None:
        known = checkpoints.numbers(self._folder)
        names = ", ".join(map(str, known))
        if resume is False:
            if known and known[-1] > step:
                raise ValueError(
                    f"checkpoint_dir {self._folder} holds checkpoints of an earlier run (after steps "
                    f"{names}). Pass resume=True to go on from it, or another folder."
                )
            return None
        if resume is not True and resume not in known:
            raise ValueError(
                f"resume={resume}: {self._folder} holds no checkpoint after that step, but after "
                f"{names or 'none at all'}."
            )
        if not known:
            return None
        path = self._folder / str(known[-1] if resume is True else resume)
        there = checkpoints.facts_of(path, advice="Go on from another one by resume=STEP.")
        if which := checkpoints.differences(there, self._facts, "here"):
            raise ValueError(
                f"The checkpoint {path} is of another run: {which}. Pass what that run was started "
                "with, or another checkpoint_dir."
            )
        return path

    def restored(self, kept: checkpoints.Kept) -> tuple[Any, engine.Position]:
        """The carry and the position of a checkpoint."""
        self.history = History.from_json(kept.history["history"])
        self.seconds = kept.history["seconds"]
        return self._subject.place(kept.state), engine.Position(**kept.history["position"])

    def _on_main(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return self._subject.replicas.on_main(work, *arguments, failed=RuntimeError)


def _form(tree: Any) -> str:
    """A short name of a tree's structure, shapes and dtypes."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    text = [f"{jax.tree_util.keystr(path)} {leaf.dtype}{leaf.shape}" for path, leaf in leaves]
    return f"{len(leaves)} arrays, {hashlib.sha256(chr(10).join(text).encode()).hexdigest()[:8]}"
