"""A run of `fit`: the steps, and the tasks between the steps."""

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from optperm.core import checks
from optperm.core.fingerprints import list_fingerprints
from optperm.core.fresh_jit import fresh_jit, fresh_jit_once
from optperm.core.states import (
    GoalState,
    LoopState,
    find_states,
    find_warnings,
    local_values,
    reached_goal,
)
from optperm.training import _callbacks as callbacks
from optperm.training import _commits as commits
from optperm.training import _conditions as conditions
from optperm.training import _steps as programs
from optperm.training._callbacks import Event
from optperm.training._checkpoints import CheckpointError, Folder, Shapes
from optperm.training._data import (
    MOST_TOGETHER,
    ArrayFeed,
    Fed,
    Position,
    StreamFeed,
    meet,
    takes_epoch,
)
from optperm.training._history import COUNT, GOAL, History, find_divergence
from optperm.training._layout import Layout
from optperm.training._schedule import MOST_STEPS, Schedule, Task
from optperm.training._terminal import Interrupt, Interrupted
from optperm.training._train_state import Model, TrainState
from optperm.training._validation import Evaluator
from optperm.variance._full_gradient import full_gradient

# The reason why training ended.
Ended = Literal["finished", "stopped", "interrupted"]
# Codes that processes exchange before each call; other codes of at least 2 are numbers of signals.
_STOPPED, _FAILED = 1, 1000
# The number of steps whose lost updates are worth a warning.
_LOST_STEPS = 100


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
      state: The trained `TrainState`; None for a `flax.nnx` model. With `optperm.agn` and
        `optperm.diloco`, its params are the center after a commit of the last steps, and its optimizer
        state is the first replica's state after this commit. The model state is the mean over replicas.
      model: The trained `flax.nnx` model, the object that was passed; None for a `TrainState`.
      optimizer: The optimizer of the model; None for a `TrainState`.
      history: The `History` of the run.
      ended: `"finished"`, `"stopped"` by a callback, or `"interrupted"` by Ctrl-C or SIGTERM.
      epoch: The number of whole epochs since the start of the first run.
      step: The number of steps since the start of the first run.
      best_state: With `keep_best`, the `TrainState` or the `flax.nnx` model of the best row of the
        history, with the params that were evaluated. None without `keep_best`, or if the metric was
        never finite.
      best_step: The number of steps taken at the best row.
      signal: The number of the signal that interrupted training; 0 for no signal.
    """

    state: TrainState | None
    model: Any
    optimizer: Any
    history: History
    ended: Ended
    epoch: int
    step: int
    best_state: Any
    best_step: int | None
    signal: int = 0


@dataclasses.dataclass(frozen=True)
class Setup:
    """The inputs of a run, which `fit` makes from its arguments."""

    source: Any  # the `TrainState` or the `flax.nnx` model that was passed
    optimizer: Any
    model: Model
    carry: TrainState  # the carry before the first step; the run donates it
    layout: Layout
    feed: ArrayFeed | StreamFeed
    key: int | jax.Array
    schedule: Schedule
    evaluate: Evaluator | None
    keep_best: tuple[str, str] | None  # a column of the history, and its mode
    folder: Folder | None
    facts: Mapping[str, Any]  # values that identify the run, by name


class Run:
    """One call of `fit`: its inputs, and the values that change between steps."""

    show: Callable[[int], None] | None = None  # shows the progress
    is_warned = False
    is_counted = False  # whether the count of the loss is known to be a count
    is_seen = False  # whether the warnings of the optimizer state after the first steps are issued
    commit: Callable[..., Any] | None = None
    interrupt: Interrupt | None = None

    def __init__(self, given: Setup) -> None:
        """Begin a run before its first step."""
        self.given, self.layout, self.carry = given, given.layout, given.carry
        self.at, self.history = Position(), History()
        self.due = list[
            Task
        ]()  # the tasks after the last step that are not done yet, in their order
        self.best = dict[str, Any]()  # the value, step and state of the best row
        self.said = set[str]()  # warnings of the optimizer state
        self.is_narrow = conditions.has_narrow_params(given.carry)
        self.lost_since: int | None = None  # the first of the last steps that lost their updates
        self.looked_at = 0  # the last step whose updates were looked at
        # An `epoch_start` may change the state later, even if it has not changed anything yet.
        self.is_judged = given.schedule.epoch_start is None
        if not self.is_judged or conditions.samples(given.carry.opt_state):
            given.feed.look = self._check_conditions
        self.monitored = [each.monitor for each in given.schedule.find_early_stopping()]
        self.monitored += [given.keep_best[0]] if given.keep_best else []
        # With local steps of several processes: the step and the number of the last commit, and the
        # number of steps from one commit to the next, as far as the run has seen it.
        self.last_commit, self.commits, self.period = 0, 0, 0

    def resume(self, resume: bool | int) -> None:
        """If `resume` is not False, resume from a checkpoint of a run with the same facts."""
        folder, feed, layout = self.given.folder, self.given.feed, self.layout
        if folder is None or (chosen := folder.choose(resume)) is None:
            return
        arrays = programs.unwrap_keys(self.carry)
        run = folder.read(chosen, self.facts, self.shapes)
        is_dealt = layout.own and run["replicas"] != layout.replicas
        trees = {"state": layout.shape_stacked(arrays, run["replicas"]) if is_dealt else arrays}
        if run["best"]:
            whole = commits.merge_replicas(self.carry, layout)
            trees["best"] = programs.unwrap_keys(whole)
        held, rows = folder.read_arrays(chosen, trees)
        if run["best"]:
            self.best = {**run["best"], "state": programs.wrap_keys(held["best"], whole)}
        arrays = layout.deal(held["state"]) if is_dealt else held["state"]
        self.carry = programs.copy_arrays(programs.wrap_keys(arrays, self.carry))
        self.at, self.due = Position(*run["position"]), run["due"]
        self.history = History(dict(zip(run["names"], rows, strict=True)), run["epochs"])
        if isinstance(feed, StreamFeed):
            feed.go_to(self.at, run["iterator"])

    @functools.cached_property
    def facts(self) -> dict[str, Any]:
        """The values that identify the run in its checkpoints."""
        return {**self.given.facts, "each replica with its own": self.layout.own}

    @functools.cached_property
    def shapes(self) -> Shapes:
        """The arrays of the carry and the arguments that shape them, which never change."""
        own = int(self.layout.own)
        # States without arrays count too: Orbax compares the whole tree.
        leaves = jax.tree_util.tree_leaves_with_path(
            programs.unwrap_keys(self.carry), is_leaf=_is_childless
        )
        arrays = {
            jax.tree_util.keystr(path): f"{x.dtype}{x.shape[own:]}"
            if hasattr(x, "dtype")
            else "empty"
            for path, x in leaves
        }
        return Shapes(arrays, list_fingerprints(self.carry.opt_state))

    def train(self, interrupt: Interrupt) -> Ended:
        """Train until the schedule is over, or until the run ends early."""
        self.interrupt, self.began = interrupt, self.at
        given, schedule = self.given, self.given.schedule
        self._since = time.perf_counter()
        error: BaseException | None = None
        if self.monitored:
            state = commits.merge_replicas(self.carry, self.layout)
            evaluated = given.evaluate.columns(state) if given.evaluate else ()
            callbacks.check_columns(self.monitored, evaluated, None)
        stop = False
        with contextlib.suppress(Interrupted):
            stop = self._do_what_is_due() or self._was_stopped()
        compiled = programs.compile_steps(
            given.model, self.layout, self.carry, given.feed.rows, given.key
        )
        while True:
            # The maximum code decides, so all processes leave the loop at the same step.
            code = _FAILED if error else interrupt.number or _STOPPED * int(stop)
            is_over, count = schedule.is_over(self.at), self._count_steps()
            read = given.feed.read(self.at, 0 if code or is_over else count)
            code, common = meet(code, read)
            if code or is_over:
                break
            try:
                if not self.at.offset:
                    self._start_epoch()
                fed = given.feed.run(compiled, self.carry, self.at, count, interrupt, common)
                self._record(fed)
                self._check_count(fed)
                self._check_first_steps()
                error = fed.error
                stop = self._do_what_is_due()
            except Interrupted:
                continue  # all processes see the number of the signal
            except (Exception, SystemExit) as raised:
                error = raised
        if code != _FAILED and schedule.is_over(self.at) and not self.due:
            code = 0  # a stop or a signal in the last step changes nothing
        if not code and self.at.offset and not self._has_row:
            try:
                self._end_within_epoch()
            except Interrupted as raised:
                code = raised.number
            except (Exception, SystemExit) as raised:
                error = raised
        if code == _FAILED and error is None:
            error = RuntimeError("Another process has failed: see its error.")
        if error is not None:
            self._save_after(error)
            raise error
        interrupt.number = interrupt.number or (0 if code == _STOPPED else code)
        return "finished" if not code else "stopped" if code == _STOPPED else "interrupted"

    def _save_after(self, error: BaseException) -> None:
        """Save the trained state, unless a call that failed on the devices deleted its carry.

        A resumed run continues with the next step, not with the tasks that the error prevented.
        """
        self.due = []
        if not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.carry)):
            self.result("stopped", error)

    def _end_within_epoch(self) -> None:
        """Add a row for the part of an epoch in which `steps` ends training.

        The checkpoint does not have this row, because a resumed run adds a row at the end of the epoch.
        """
        self._save()
        self.due = ["row", "epoch"]
        self._do_what_is_due()

    def _check_conditions(self, batch: Any) -> None:
        """Warn if the loss is not a mean, or if its gradient does not reach a sampler."""
        given, self.is_counted = self.given, True
        args = self.carry, batch, given.model, self.layout, given.key
        for text in conditions.find_broken_conditions(*args):
            warnings.warn(text, stacklevel=5)  # where fit is called

    def _check_count(self, fed: Fed) -> None:
        """Warn after the first steps if the loss is a pair whose second value is no count."""
        if self.is_counted or COUNT not in fed.columns:
            return
        self.is_counted, given = True, self.given
        if not conditions.is_count(self.carry, given.feed.example(), given.model, self.layout):
            warnings.warn(conditions.NOT_COUNT, stacklevel=4)  # where fit is called

    def _check_first_steps(self) -> None:
        """Issue the warnings of the optimizer state after two steps, since rows may come much later.

        After a step, a method may find that something has changed its updates. A call has 100 steps.
        """
        if not self.is_seen and self.is_judged and self.at.step >= self.began.step + 2:
            self.is_seen = True
            self.warn_of_state(stacklevel=5)  # where fit is called

    def _check_updates(self) -> None:
        """Warn once if most updates of params in 16 bits round to nothing, at rows 100 steps apart."""
        given, step = self.given, self.at.step
        self.looked_at, batch = step, given.feed.example()
        if batch is None or not conditions.loses_updates(
            self.carry, batch, given.model, self.layout, given.key
        ):
            self.lost_since = None
        elif self.lost_since is None:
            self.lost_since = step
        elif step >= self.lost_since + _LOST_STEPS:
            self.is_narrow = False
            warnings.warn(conditions.LOST_UPDATES, stacklevel=6)  # where fit is called

    def _start_epoch(self) -> None:
        self._judge_steps()
        change, carry, layout = self.given.schedule.epoch_start, self.carry, self.layout
        if change is not None and takes_epoch(change):  # or `epoch_start` is the change
            change = change(self.at.epoch)
        if change is None:
            return
        self.is_judged = True
        with layout.context():
            bound = jax.tree_util.Partial(self.given.model, carry.model_state, carry.step_rng())
            batches = self.given.feed.all_batches(self.at.epoch, self.interrupt)
            grad = full_gradient(bound, carry.params, batches, has_aux=True)
            begin = fresh_jit_once(change)
            if layout.mesh:
                there = jax.tree.map(lambda leaf: leaf.sharding, carry.opt_state)
                begin = fresh_jit(change, out_shardings=there)
            opt_state = begin(carry.opt_state, carry.params, grad)
        says = "The optimizer state that epoch_start returned"
        checks.check_same_tree(says, opt_state, carry.opt_state, source="the one before")
        # Copy the carry, since the new state may share memory with the params, and both are donated.
        self.carry = programs.copy_arrays(carry.replace(opt_state=opt_state))

    def _judge_steps(self) -> None:
        """Warn if a method finds something wrong with its steps, until the first warning."""
        if self.is_warned or not self.history.num_steps:
            return
        for state in find_states(self.carry.opt_state, LoopState):
            judge = state.for_loop().judge
            for text in judge(self.history.steps) if judge is not None else ():
                self.is_warned = True
                warnings.warn(text, stacklevel=5)  # where fit is called

    def _record(self, fed: Fed) -> None:
        """Record some steps, and find the tasks that are due after them."""
        at = self.at
        epoch, offset = (at.epoch + 1, 0) if fed.is_over else (at.epoch, at.offset + fed.steps)
        self.carry, self.at = fed.carry, Position(at.step + fed.steps, epoch, offset)
        self.due = self.given.schedule.find_due(
            self.at, is_end=fed.is_over, has_row=self._has_row, has_stepped=fed.steps > 0
        )
        if fed.is_over:  # its seconds include the last steps, which may still be running
            jax.block_until_ready(fed.columns)
        self.history.add_steps(fed.columns, fed.steps)
        if self.given.feed.steps_per_epoch is not None:  # each step has the same columns
            columns = ("epoch", "step", "seconds", *fed.columns)
            callbacks.check_columns(self.monitored, None, columns)
        if self.show is not None:
            self.show(self.at.step)
        if jax.process_count() > 1 and self.layout.own:
            self._find_period()

    def _find_period(self) -> None:
        """Note the number of steps between the last commits."""
        found = commits.count_commits(self.carry.opt_state)
        last = self.at.step - commits.steps_since_commit(self.carry.opt_state)
        if found > self.commits:
            self.period = (last - self.last_commit) // (found - self.commits)
            self.commits, self.last_commit = found, last

    def _count_steps(self) -> int:
        """Return the number of steps of the next call, after which the processes meet.

        With local steps, a call ends with a commit, at which replicas wait for each other anyway.
        """
        most = MOST_STEPS
        if self.period:
            first = self.period - (self.at.step - self.last_commit) % self.period
            most = first + max(MOST_STEPS - first, 0) // self.period * self.period
        return self.given.schedule.count_steps(self.at, min(most, MOST_TOGETHER))

    def _do_what_is_due(self) -> bool:
        """Do the tasks that are due after the last step; return True if a callback stops the run.

        A task stays due until it is done, so after a signal, the resumed run does it again.
        """
        stop = False
        while self.due:
            task, *rest = self.due
            if task == "row":
                self._add_row()
            elif task == "checkpoint":
                self.due = rest
                self._save()
            else:
                stop |= callbacks.wants_to_stop(*self._find_called(task))
                if not isinstance(task, int):
                    self._since = time.perf_counter()
            self.due = rest
        return stop

    def _find_called(self, task: Task) -> tuple[str, tuple[callbacks.Callback, ...], Event]:
        """Return the name and the callbacks of a task, and their event."""
        history, called = self.history, self.given.schedule.find_callbacks(task)
        if isinstance(task, int):
            means = functools.partial(history.means, task, history.num_steps)
            return *called, self._event(means)
        metrics = {k: v for k, v in history.last.items() if k not in ("epoch", "step")}
        return *called, self._event(lambda: metrics, True)

    def _was_stopped(self) -> bool:
        """Return True if callbacks that depend only on rows stopped an earlier run at this step."""
        early = self.given.schedule.find_early_stopping(self.at.step) if self._has_row else ()
        return callbacks.wants_to_stop("", tuple(early), self._event(dict))

    def _add_row(self) -> None:
        """Add a row to the history, with an evaluation, and keep the best state."""
        at, seconds, keep_best = self.at, time.perf_counter() - self._since, self.given.keep_best
        evaluated = self._evaluate() if self.given.evaluate else {}
        has_reached = self._has_reached_goal()
        self.history.add_epoch(self._epoch, at.step, seconds, evaluated, has_reached)
        if self.is_judged:
            self.warn_of_state(stacklevel=6)
        if self.is_narrow and at.step >= self.looked_at + _LOST_STEPS // 2:
            self._check_updates()
        row = self.history.last
        callbacks.check_columns(self.monitored, row, row)
        if keep_best is None:
            return
        name, mode = keep_best
        value = row[name] * (1.0 if mode == "min" else -1.0)
        if has_reached is not False and value < self.best.get("value", math.inf):
            state = programs.copy_arrays(self._merge())
            self.best = {"value": value, "step": at.step, "state": state}

    def _has_reached_goal(self) -> bool | None:
        """Return whether the optimizer has reached its goal; None if it has no goal."""
        opt_state = self.carry.opt_state
        if not find_states(opt_state, GoalState):
            return None
        return bool(np.all(local_values(reached_goal(opt_state))))

    @property
    def _epoch(self) -> int:
        """The epoch of the last step."""
        return self.at.epoch if self.at.offset else self.at.epoch - 1

    @property
    def _has_row(self) -> bool:
        """True if the last step has a row."""
        return self.history.last.get("step") == self.at.step

    def _event(self, metrics: Callable[[], Mapping[str, float]], is_row: bool = False) -> Event:
        where = self._epoch, self.at.step, self.history, is_row
        trained = lambda: self._bring_home(programs.copy_arrays(self._merge()))  # noqa: E731
        return Event(*where, metrics, trained, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self.given.evaluate is None:
            raise ValueError(
                "There is nothing to evaluate: pass validation=Validation(...) to fit."
            )
        return self.given.evaluate(self._merge(), self._epoch, self.interrupt)

    def _merge(self) -> TrainState:
        """Return the trained state so far, after a commit on a copy."""
        given, carry, layout = self.given, self.carry, self.layout
        if commits.steps_since_commit(carry.opt_state):
            if self.commit is None:
                self.commit = commits.compile_commit(given.model, layout, carry, given.key)
            carry = commits.commit(self.commit, carry, given.feed.example(), layout)
        return commits.merge_replicas(carry, layout)

    def _bring_home(self, state: TrainState) -> Any:
        return self.given.model.unwrap(self.layout.bring_home(state))

    def _save(self) -> None:
        folder = self.given.folder
        if folder is None or not self.at.step:
            return  # there is nothing to resume yet, and Orbax cannot write arrays without entries
        feed, best = self.given.feed, dict(self.best)
        trees = {"state": programs.unwrap_keys(self.carry)}
        if best:
            trees["best"] = programs.unwrap_keys(best.pop("state"))
        run = {
            "facts": self.facts,
            "shapes": dataclasses.asdict(self.shapes),
            "position": list(self.at),
            "due": self.due,
            "names": list(self.history.steps),
            # Orbax writes this copy while training continues
            "epochs": list(self.history.epoch_rows),
            "iterator": feed.states() if isinstance(feed, StreamFeed) else None,
            "replicas": self.layout.replicas,
            "best": best,
        }
        rows = np.array(list(self.history.steps.values()), np.float32)
        folder.write(self.at.step, trees, rows, run)

    def warn_of_state(self, stacklevel: int = 3, *, is_over: bool = False) -> None:
        """Issue each warning of the optimizer state once, at the call of `fit`."""
        for text in find_warnings(self.carry.opt_state, self.carry.params, is_over=is_over):
            if text not in self.said:
                self.said.add(text)
                warnings.warn(text, stacklevel=stacklevel)

    def warn_of_result(self, result: FitResult) -> None:
        """Warn if the params lack steps, if there was no commit, or if the loss is not finite."""
        commits.warn_of_lost_steps(self.carry, self.merged, self.layout, 4)
        has_stepped = result.ended == "finished" and self.at.step > self.began.step
        if has_stepped and commits.has_no_commit(self.carry.opt_state):
            says = f"The run ended after {self.at.step} steps, before the first commit of agn or diloco"
            advice = "replicas trained apart until its end. Lower every"
            warnings.warn(f"{says}: {advice}.", stacklevel=3)  # where fit is called
        if result.ended != "interrupted" and self._has_reached_goal() is not None:
            self.warn_of_state(stacklevel=4, is_over=True)
        keep_best = self.given.keep_best
        if keep_best is not None and result.best_step is None and self.history.epoch_rows:
            says = f"{keep_best[0]} was never finite"
            if not any(self.history.epochs.get(GOAL, [True])):
                says = "The optimizer reached its goal (its last phase, or its sparsity) in no row"
            says = f"{says}, so keep_best has stored no best_state."
            warnings.warn(says, RuntimeWarning, stacklevel=3)
        if (row := find_divergence(self.history)) is not None:
            says = f"The loss stopped being finite at step {row} of {self.at.step}."
            warnings.warn(says, RuntimeWarning, stacklevel=3)  # where fit is called

    def result(self, ended: Ended, error: BaseException | None = None) -> FitResult:
        """Write the last checkpoint, update the `flax.nnx` model, and return the result."""
        folder = self.given.folder
        failure: CheckpointError | None = None
        try:
            self._save()  # comes first, since the machine may be about to stop
        except CheckpointError as raised:
            failure = raised
        result = self._result(ended, error)
        try:
            if folder is not None and failure is None:
                folder.close()
        except CheckpointError as raised:
            failure = raised
        if failure is not None:
            failure.result = result
            if error is None:
                raise failure
            error.add_note(f"The trained state could not be saved: {failure}")
        if isinstance(error, CheckpointError):
            error.result = result
        return result

    def _result(self, ended: Ended, error: BaseException | None) -> FitResult:
        try:
            self.merged = self._merge()
        except Exception:
            if error is None:
                raise
            self.merged = commits.merge_replicas(self.carry, self.layout)
        given, state, best = self.given, self.layout.bring_home(self.merged), self.best
        is_linen = given.model.graphdef is None
        if not is_linen:
            own = programs.copy_arrays(state)
            nnx.update(given.source, own.params, own.model_state[1])
            nnx.update(given.optimizer.opt_state, nnx.state(own.opt_state))
            given.optimizer.step.set_value(own.step)
        return FitResult(
            state=state if is_linen else None,
            model=None if is_linen else given.source,
            optimizer=given.optimizer,
            history=self.history,
            ended=ended,
            epoch=self.at.epoch - 1,
            step=self.at.step,
            best_state=self._bring_home(best["state"]) if best else None,
            best_step=best.get("step"),
        )


def _is_childless(tree: Any) -> bool:
    return not jax.tree_util.treedef_children(jax.tree.structure(tree))
