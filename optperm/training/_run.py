"""One run of `fit`: its steps, and everything between the steps."""

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from optperm.bayes._report import SAMPLERS
from optperm.core import checks
from optperm.core.current import jit_current
from optperm.core.states import find_states, find_warnings
from optperm.permutation._standstill import warn_if_still
from optperm.training import _callbacks as callbacks
from optperm.training import _commits as commits
from optperm.training import _processes as processes
from optperm.training import _steps as programs
from optperm.training._callbacks import EarlyStopping, Event
from optperm.training._checkpoints import CheckpointError, Checkpoints
from optperm.training._data import ArrayFeed, Fed, Position, StreamFeed, is_arrays, takes_epoch
from optperm.training._history import History, find_divergence
from optperm.training._layout import Layout, choose_layout, count_idle_devices
from optperm.training._terminal import Interrupt
from optperm.training._train_state import TrainState
from optperm.variance._full_gradient import full_gradient

# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]
# Codes that the processes exchange before each call; from 2 on, the number of a signal.
_STOPPED, _FAILED = 1, 1000
# Arguments of `fit` that are integers from 1 on.
COUNTS = (
    *("epochs", "steps", "steps_per_call", "eval_batch_size", "eval_every", "checkpoint_every"),
    "checkpoint_keep",
)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """The result of `fit`.

    Attributes:
      state: The trained `TrainState`; None for a `flax.nnx` model. With `optperm.agn` and
        `optperm.diloco`, its params are the center after a commit of the last steps, and its optimizer
        state is the first replica's after that commit. The model state is the mean over replicas.
      model: The trained `flax.nnx` model, the object that was passed; None for a `TrainState`.
      optimizer: The optimizer of the model; None for a `TrainState`.
      history: The `History` of the run.
      ended: `"finished"`, `"stopped"` by a callback, or `"interrupted"` by Ctrl-C or SIGTERM.
      epoch: Whole epochs done since the start of the first run.
      step: Steps done since the start of the first run.
      best_state: With `keep_best`, the `TrainState` or the `flax.nnx` model of the best row of the
        history, with the params that were evaluated; None without it, or if the metric was never finite.
      best_step: The number of steps done at the best row.
      signal: The number of the signal that interrupted training; 0 for none.
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


class Run:
    """One call of `fit`: the carry, its layout, its batches, and the callbacks between steps."""

    checkpoints: Checkpoints | None = None
    show: Any = None
    is_still = False
    commit: Callable[..., Any] | None = None

    def __init__(self, given: Any) -> None:
        """Prepare a run; `given` has the arguments of `fit`."""
        processes.check_devices()
        with processes.together():
            initial = self._prepare(given)
        data, size = given.train_data, given.batch_size
        layout = self.layout
        kind = "linen" if self.model.graphdef is None else "nnx"
        self.facts = {"the kind of model": kind, "keep_best": given.keep_best}
        if jax.process_count() > 1 or given.checkpoints is not None:
            self.facts |= self.feed.facts()
        if jax.process_count() > 1:
            digest = {"the digest of params": processes.digest(initial.params)}
            counts = {name: getattr(given, name) for name in COUNTS}
            if isinstance(data, list | tuple) and isinstance(self.feed, StreamFeed):
                counts["the number of batches"] = len(data)
            processes.check_same({**self.facts, **counts, **digest})
        how = given.eval_batch_size or size, self.model, Layout(layout.mesh, layout.batch)
        self.evaluate = given.eval_fn and programs.Evaluator(given.eval_fn, given.eval_data, *how)
        every = (given.every or {}).items()
        self.every = {int(n): callbacks.as_callbacks(functions) for n, functions in every}
        self.epoch_end = callbacks.as_callbacks(given.on_epoch_end)
        self.eval_every = given.eval_every or math.inf
        self.checkpoint_every = given.checkpoint_every or math.inf
        self.keep_best, self.best = given.keep_best, dict[str, Any]()
        called = (*self.epoch_end, *sum(self.every.values(), ()))
        self.monitored = [f.monitor for f in called if isinstance(f, EarlyStopping)]
        self.monitored += [given.keep_best[0]] if given.keep_best else []
        self.at, self.history = Position(), History()
        if given.checkpoints is not None:
            self.checkpoints = Checkpoints(given.checkpoints, given.checkpoint_keep)
            self._resume(self.checkpoints, given.resume)

    def _prepare(self, given: Any) -> TrainState:
        """Place the state and the data, and return the state that was given."""
        self.source = given.state_or_model, given.optimizer
        self.model, initial = programs.wrap_model(*self.source, given.loss_fn, bool(given.has_aux))
        self.layout = layout = choose_layout(initial.tx, initial, given.mesh, given.axis_name)
        if layout.mesh is None and (idle := count_idle_devices(initial)):
            mesh = 'jax.make_mesh((jax.local_device_count(),), ("replica",))'
            says = (
                f"{idle} of {jax.local_device_count()} devices stay idle: pass mesh={mesh} to fit"
            )
            warnings.warn(
                f"{says}, or place the state on one device by jax.device_put.", stacklevel=4
            )
        data, size, self.key = given.train_data, given.batch_size, given.key
        if given.epoch_start is not None and (layout.own or isinstance(data, Iterator)):
            why = "replicas have states of their own" if layout.own else "an iterator is read once"
            raise ValueError(f"epoch_start needs all batches and one state, but {why}.")
        self.carry = programs.place_state(initial, layout)
        self.steps_per_call, self.epoch_start = int(given.steps_per_call), given.epoch_start
        # A schedule of `epoch_start` that has changed nothing yet may still do so.
        self.is_judged, self.said = given.epoch_start is None, set[str]()
        self.feed: ArrayFeed | StreamFeed
        if is_arrays("train_data", data):
            draws = bool(find_states(self.carry.opt_state, SAMPLERS))
            self.feed = ArrayFeed(data, size, given.key, layout, self.steps_per_call, draws)
        else:
            self.feed = StreamFeed(data, size, layout)
        return initial

    def _resume(self, checkpoints: Checkpoints, resume: bool | int) -> None:
        """Resume from a checkpoint of a run that agrees with this one, if `resume` asks for it."""
        arrays, layout = programs.unwrap_keys(self.carry), self.layout
        leaves, own = jax.tree_util.tree_leaves_with_path(arrays), int(layout.own)
        form = [f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape[own:]}" for path, x in leaves]
        digest = processes.digest(np.frombuffer(str(form).encode(), np.uint8))
        self.facts["the form of optimizer and model"] = f"{len(form)} arrays, {digest}"
        self.facts["each replica with its own"] = layout.own
        if (chosen := checkpoints.choose(resume)) is None:
            return
        run = checkpoints.read(chosen, self.facts)
        is_dealt = layout.own and run["replicas"] != layout.replicas
        trees = {"state": layout.shape_stacked(arrays, run["replicas"]) if is_dealt else arrays}
        if run["best"]:
            trees["best"] = programs.unwrap_keys(
                whole := commits.merge_replicas(self.carry, layout)
            )
        held, rows = checkpoints.read_arrays(chosen, trees)
        if run["best"]:
            self.best = {**run["best"], "state": programs.wrap_keys(held["best"], whole)}
        arrays = layout.deal(held["state"]) if is_dealt else held["state"]
        self.carry = programs.copy_arrays(programs.wrap_keys(arrays, self.carry))
        self.at = Position(*run["position"])
        self.history = History(dict(zip(run["names"], rows, strict=True)), run["epochs"])
        if isinstance(self.feed, StreamFeed):
            self.feed.go_to(self.at, run["iterator"])

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Train until the end of a number of epochs or steps, whichever comes first."""
        self._since, stop, code = time.perf_counter(), False, 0
        error: BaseException | None = None
        if self.monitored:
            state = commits.merge_replicas(self.carry, self.layout)
            evaluated = self.evaluate.columns(state) if self.evaluate else ()
            callbacks.check_columns(self.monitored, evaluated, None)
        goes_on = self.at.epoch <= epochs and self.at.step < steps
        if goes_on and self._has_row_of_part:
            self.history.epoch_rows.pop()  # the epoch gets one when it is over
        if self.at.step and self._row is None and (not self.at.offset or self._evaluates):
            self._add_row()  # the earlier run failed between a step and its row
            stop = self._call_row(is_end=not self.at.offset)
        due = [f for n, f in self.every.items() if self.at.step % n == 0]
        early = [f for f in (*self.epoch_end, *sum(due, ())) if isinstance(f, EarlyStopping)]
        if self._row is not None and callbacks.wants_to_stop(
            "", tuple(early), self._event(dict, True)
        ):
            return "stopped"  # the earlier run had stopped here
        compiled = programs.compile_steps(
            self.model, self.layout, self.carry, self.feed.rows, self.key
        )
        while self.at.epoch <= epochs and self.at.step < steps:
            # All processes leave the loop at the same step, by the largest code.
            code = _FAILED if error else interrupt.number or _STOPPED * int(stop)
            code = int(processes.gather(np.int32(code)).max())
            if code:
                break
            try:
                if not self.at.offset:
                    self._start_epoch()
                # A call of steps ends at the next step after which something is due.
                at, dues = self.at.step, (self.eval_every, self.checkpoint_every, *self.every)
                limit = int(min(self.steps_per_call, steps - at, *(n - at % n for n in dues)))
                fed = self.feed.run(compiled, self.carry, self.at, limit, interrupt)
                stop, error = self._after(fed, steps), fed.error
            except (Exception, SystemExit) as raised:
                error = raised
        if code == _FAILED and error is None:
            error = RuntimeError("another process has failed: see its error.")
        if error is not None:
            # A call that failed on the devices has deleted the carry that was donated to it.
            if not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.carry)):
                self.result("stopped", error)  # save what has been trained
            raise error
        interrupt.number = interrupt.number or (0 if code == _STOPPED else code)
        return "finished" if not code else "stopped" if code == _STOPPED else "interrupted"

    def _start_epoch(self) -> None:
        if not self.is_still and "fraction_moved" in self.history.means(1):
            moved = self.history.steps["fraction_moved"]
            self.is_still = warn_if_still(moved, stacklevel=5)  # where fit is called
        change, carry, layout = self.epoch_start, self.carry, self.layout
        if change is not None and takes_epoch(change):  # else `epoch_start` is the change itself
            change = change(self.at.epoch)
        if change is None:
            return
        self.is_judged = True
        with layout.context():
            bound = jax.tree_util.Partial(self.model, carry.model_state, carry.step_rng())
            batches = self.feed.all_batches(self.at.epoch)
            grad = full_gradient(bound, carry.params, batches, has_aux=True)
            there = layout.mesh and jax.tree.map(lambda leaf: leaf.sharding, carry.opt_state)
            begin = jit_current(change, out_shardings=there)
            opt_state = begin(carry.opt_state, carry.params, grad)
        says = "The optimizer state that epoch_start returned"
        checks.check_same_tree(says, opt_state, carry.opt_state, source="the one before")
        # Copied, as the new state may share memory with the params, and both are donated.
        self.carry = programs.copy_arrays(carry.replace(opt_state=opt_state))

    def _after(self, fed: Fed, steps: float) -> bool:
        """Record some steps and call what is due; return True if a callback asks to stop."""
        stop, at = False, self.at
        epoch, offset = (at.epoch + 1, 0) if fed.is_over else (at.epoch, at.offset + fed.steps)
        self.carry, self.at = fed.carry, Position(at.step + fed.steps, epoch, offset)
        if (
            offset == 0
        ):  # the seconds of an epoch include its last steps, which may still be running
            jax.block_until_ready(fed.columns)
        self.history.add_steps(fed.columns, fed.steps)
        if self.feed.steps_per_epoch is not None:  # each step has the same columns
            columns = ("epoch", "step", "seconds", *fed.columns)
            callbacks.check_columns(self.monitored, None, columns)
        if self.show is not None:
            self.show(self.at.step)
        # A stream shows the end of its epoch only when the next batch is requested, after the last step:
        # then the step may have its row already.
        is_end = fed.is_over or self.at.step >= steps
        if is_row := (is_end or self._evaluates) and self._row is None:
            self._add_row()
        for n in [n for n in self.every if fed.columns and self.at.step % n == 0]:
            event = self._event(functools.partial(self.history.means, n, self.history.num_steps))
            stop |= callbacks.wants_to_stop(f"every[{n}]", self.every[n], event)
        if is_end or is_row:
            stop |= self._call_row(is_end)
        if self.checkpoints is not None and self.at.step % self.checkpoint_every == 0:
            self._save(self.checkpoints)
        return stop

    @property
    def _evaluates(self) -> bool:
        """True if `eval_every` asks for a row after the last step."""
        return self.at.step % self.eval_every == 0

    def _add_row(self) -> None:
        """Add a row to the history, with an evaluation, and keep the best state."""
        at, seconds = self.at, time.perf_counter() - self._since
        evaluated = self._evaluate() if self.evaluate else {}
        self.history.add_epoch(self._epoch, at.step, seconds, evaluated)
        if self.is_judged:
            self.warn_of_state(stacklevel=6)
        if self.keep_best is not None:
            callbacks.check_columns([self.keep_best[0]], self.history.last, self.history.last)
        if not self._has_row_of_part:
            self.best = self._choose_best()

    def _choose_best(self) -> dict[str, Any]:
        """Return the best row with its state: the best of before, or the last row."""
        if self.keep_best is None or self._row is None:
            return self.best
        name, mode = self.keep_best
        value = self._row[name] * (1.0 if mode == "min" else -1.0)
        if not value < self.best.get("value", math.inf):
            return self.best
        state = programs.copy_arrays(self._merge())
        return {"value": value, "step": self.at.step, "state": state}

    def _call_row(self, is_end: bool) -> bool:
        """Call the functions of `on_epoch_end`; within an epoch only those that read every row."""
        called = tuple(f for f in self.epoch_end if is_end or isinstance(f, callbacks.OF_ROWS))
        metrics = {k: v for k, v in self.history.last.items() if k not in ("epoch", "step")}
        event = self._event(lambda: metrics, True)
        stop = callbacks.wants_to_stop("on_epoch_end", called, event)
        self._since = time.perf_counter()
        return stop

    @property
    def _epoch(self) -> int:
        """The epoch of the last step."""
        return self.at.epoch if self.at.offset else self.at.epoch - 1

    @property
    def _row(self) -> dict[str, float] | None:
        """The row of the last step, if it has one."""
        row = self.history.last
        return row if row.get("step") == self.at.step else None

    @property
    def _has_row_of_part(self) -> bool:
        """True if the last row is of a part of an epoch, which `steps` ended: resuming drops it."""
        return self._row is not None and bool(self.at.offset) and not self._evaluates

    def _event(self, metrics: Callable[[], Mapping[str, float]], is_row: bool = False) -> Event:
        where = self._epoch, self.at.step, self.history, is_row
        trained = lambda: self._bring_home(programs.copy_arrays(self._merge()))  # noqa: E731
        return Event(*where, metrics, trained, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            raise ValueError("There is nothing to evaluate: pass eval_fn and eval_data to fit.")
        return self.evaluate(self._merge(), self._epoch)

    def _merge(self) -> TrainState:
        """Return what has been trained so far: the state after a commit, made on a copy."""
        carry, layout = self.carry, self.layout
        if commits.steps_since_commit(carry.opt_state):
            if self.commit is None:
                self.commit = commits.compile_commit(self.model, layout, carry, self.key)
            carry = commits.commit(self.commit, carry, self.feed.example(), layout)
        return commits.merge_replicas(carry, layout)

    def _bring_home(self, state: TrainState) -> Any:
        return self.model.unwrap(self.layout.bring_home(state))

    def _save(self, checkpoints: Checkpoints) -> None:
        # Lists are copied, as Orbax writes them while training continues.
        run: dict[str, Any] = {"facts": self.facts, "position": list(self.at)}
        run |= {"names": list(self.history.steps), "epochs": list(self.history.epoch_rows)}
        states = self.feed.states() if isinstance(self.feed, StreamFeed) else None
        run |= {"iterator": states, "replicas": self.layout.replicas}
        run["best"] = {name: value for name, value in self.best.items() if name != "state"}
        trees = {"state": programs.unwrap_keys(self.carry)}
        trees |= {"best": programs.unwrap_keys(self.best["state"])} if self.best else {}
        rows = np.array(list(self.history.steps.values()), np.float32)
        checkpoints.write(self.at.step, trees, rows, run)

    def warn_of_state(self, stacklevel: int = 3) -> None:
        """Give the warnings of the optimizer state, each of them once, where `fit` is called."""
        for text in find_warnings(self.carry.opt_state, self.carry.params):
            if text not in self.said:
                self.said.add(text)
                warnings.warn(text, stacklevel=stacklevel)

    def warn_if_too_short(self, total: float) -> None:
        """Warn before training if it ends before the first commit."""
        steps = total - self.at.step
        if 0 < steps < math.inf:
            self._warn_without_commit(total, steps)

    def _warn_without_commit(self, total: float, steps: float) -> None:
        """Warn if a run of `total` steps, of which `steps` are left, ends before the first commit."""
        if commits.ends_before_commit(self.carry, steps, self.layout):
            says = f"The run ends after {total:.0f} steps, before the first commit of agn or diloco"
            advice = "replicas train apart until its end. Lower every"
            warnings.warn(f"{says}: {advice}.", stacklevel=4)  # where fit is called

    def warn_of_result(self, result: FitResult, total: float) -> None:
        """Warn if steps are missing from the params, or the loss is not finite at the end."""
        commits.warn_of_lost_steps(self.carry, self.merged, self.layout, 4)
        if math.isinf(total) and result.ended == "finished":  # its length was not known before
            self._warn_without_commit(self.at.step, 0)
        if self.keep_best is not None and result.best_step is None and self.history.epoch_rows:
            says = f"{self.keep_best[0]} was never finite, so keep_best has kept no best_state."
            warnings.warn(says, RuntimeWarning, stacklevel=3)
        if (row := find_divergence(self.history)) is not None:
            says = f"The loss stopped being finite at step {row} of {self.at.step}."
            warnings.warn(says, RuntimeWarning, stacklevel=3)  # where fit is called

    def result(self, ended: Ended, error: BaseException | None = None) -> FitResult:
        """Write the last checkpoint, update the `flax.nnx` model, and return the result."""
        failure: CheckpointError | None = None
        try:
            if self.checkpoints is not None:
                self._save(self.checkpoints)  # first, as a machine may be about to end
        except CheckpointError as raised:
            failure = raised
        result = self._result(ended, error)
        try:
            if self.checkpoints is not None and failure is None:
                self.checkpoints.close()
        except CheckpointError as raised:
            failure = raised
        if failure is not None:
            failure.result = result
            if error is None:
                raise failure
            error.add_note(f"What had been trained could not be saved: {failure}")
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
        best = self._choose_best() if self._has_row_of_part else self.best
        state = self.layout.bring_home(self.merged)
        source, optimizer = self.source
        if self.model.graphdef is not None:
            own = programs.copy_arrays(state)
            nnx.update(source, own.params, own.model_state[1])
            nnx.update(optimizer.opt_state, nnx.state(own.opt_state))
            optimizer.step.set_value(own.step)
        is_linen, at = self.model.graphdef is None, self.at
        return FitResult(
            state if is_linen else None,
            None if is_linen else source,
            optimizer,
            self.history,
            ended,
            at.epoch - 1,
            at.step,
            self._bring_home(best["state"]) if best else None,
            best.get("step"),
        )
