"""One run of `fit`: its steps, and what happens between them."""

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

from optperm.bayes.diagnostics import SAMPLERS, warn_of_samplers
from optperm.contract import checks
from optperm.contract.states import find_states
from optperm.permutation.sgperm import RecommendationState
from optperm.training import processes
from optperm.training.callbacks import OF_ROWS, EarlyStopping, Event, as_callbacks, wants_to_stop
from optperm.training.checkpoints import CheckpointError, Checkpoints
from optperm.training.data import ArrayFeed, Fed, Position, StreamFeed, is_arrays, takes_epoch
from optperm.training.history import History, find_divergence
from optperm.training.layout import Layout, choose_layout
from optperm.training.steps import (
    compile_steps,
    copy_arrays,
    evaluate_all,
    merge_replicas,
    place_state,
    unwrap_keys,
    wrap_keys,
    wrap_model,
)
from optperm.training.terminal import Interrupt
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient
from optperm.variance.snapshots import SvrgState
from optperm.variance.svrg import warn_without

# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]
# What the processes say to one another before each call: a signal by its number, from 2 on.
_STOPPED, _FAILED = 1, 1000
# Weights stand still if in so many steps no more than so much of what moved in the first few does.
_WINDOW, _FIRST, _STILL = 50, 5, 0.1
# Arguments of `fit` that are numbers from 1 on.
COUNTS = (
    *("epochs", "steps", "steps_per_call", "eval_batch_size", "eval_every", "checkpoint_every"),
    "checkpoint_keep",
)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` came to.

    Attributes:
      state: The trained `TrainState`; None for a model of `flax.nnx`. Of replicas that train each by
        itself (`optperm.agn`, `optperm.diloco`) its params are the center's, its model state the mean.
      model: The trained model of `flax.nnx`, the one that was passed; None for a `TrainState`.
      optimizer: Its optimizer; None for a `TrainState`.
      history: What was recorded.
      ended: `"finished"`, `"stopped"` by a callback, or `"interrupted"` by Ctrl-C or SIGTERM.
      epoch: Whole epochs done, since the start of the first run.
      step: Steps done, likewise.
      best_state: With `keep_best` the `TrainState`, or a model of `flax.nnx`, of the best row of the
        history; None without, or where the metric was never finite.
      best_step: The steps done by then.
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
    """One call of `fit`: what is trained, where, by which batches, and what happens meanwhile."""

    checkpoints: Checkpoints | None = None
    show: Any = None
    is_still = False
    is_past_end = False

    def __init__(self, given: Any) -> None:
        """`given` has the arguments of `fit`."""
        self.source = given.state_or_model, given.optimizer
        self.model, initial = wrap_model(*self.source, given.loss_fn, bool(given.has_aux))
        places = {name: getattr(given, name) for name in ("mesh", "devices", "replicas")}
        self.layout = choose_layout(initial.tx, initial, **places)
        layout, data, size = self.layout, given.train_data, given.batch_size
        if given.epoch_start is not None and layout.own:
            says = "but here each replica has its own"
            raise ValueError(f"epoch_start changes a shared state, {says}.")
        if given.epoch_start is not None and isinstance(data, Iterator):
            raise ValueError(
                "epoch_start goes through all batches before an epoch, and this iterator gives them "
                "once: pass a list, a data loader, or a function of the epoch's number that gives one."
            )
        kind = "linen" if self.model.graphdef is None else "nnx"
        self.facts: dict[str, Any] = {"the kind of model": kind}
        if jax.process_count() > 1:
            digest = {"the digest of params": processes.digest(initial.params)}
            counts = {name: getattr(given, name) for name in COUNTS}
            processes.check_same({**self.facts, **counts, **digest})
        self.carry = place_state(initial, layout)
        self.steps_per_call, self.epoch_start = int(given.steps_per_call), given.epoch_start
        self.feed: ArrayFeed | StreamFeed
        if is_arrays("train_data", data):
            draws = bool(find_states(self.carry.opt_state, SAMPLERS))
            self.feed = ArrayFeed(data, size, int(given.seed), layout, self.steps_per_call, draws)
        else:
            self.feed = StreamFeed(data, size, layout)
        if jax.process_count() > 1:
            processes.check_same(self.feed.facts())
        how = given.eval_batch_size or size, self.model, Layout(layout.mesh, layout.batch)
        self.evaluate = given.eval_fn and functools.partial(
            evaluate_all, given.eval_fn, given.eval_data, *how
        )
        every = (given.every or {}).items()
        self.every = {int(n): as_callbacks(f"every[{n}]", f) for n, f in every}
        self.epoch_end = as_callbacks("on_epoch_end", given.on_epoch_end)
        self.eval_every = given.eval_every or math.inf
        self.checkpoint_every = given.checkpoint_every or math.inf
        self.keep_best, self.best = given.keep_best, dict[str, Any]()
        self.at, self.history = Position(), History()
        if given.checkpoints is not None:
            self.checkpoints = Checkpoints(given.checkpoints, given.checkpoint_keep)
            self._resume(self.checkpoints, given.resume)

    def _resume(self, checkpoints: Checkpoints, resume: bool | int) -> None:
        """Goes to a checkpoint, if that is asked for, of a run that agrees with this one."""
        arrays, layout = unwrap_keys(self.carry), self.layout
        leaves, own = jax.tree_util.tree_leaves_with_path(arrays), int(layout.own)
        form = [f"{jax.tree_util.keystr(path)} {x.dtype}{x.shape[own:]}" for path, x in leaves]
        digest = processes.digest(np.frombuffer(str(form).encode(), np.uint8))
        self.facts |= self.feed.facts()
        self.facts["the form of the state"] = f"{len(form)} arrays, {digest}"
        self.facts["each replica with its own"] = layout.own
        if (chosen := checkpoints.choose(resume, self.at.step)) is not None:
            run = checkpoints.read(chosen, self.facts)
            is_dealt = layout.own and run["replicas"] != layout.parts
            like = layout.lead(arrays, run["replicas"]) if is_dealt else arrays
            best, trees = dict(run["best"]), {"state": like}
            is_kept = best.pop("by", None) == list(self.keep_best or ())
            if is_kept and "step" in best:
                trees["best"] = unwrap_keys(whole := merge_replicas(self.carry, layout))
            held, rows = checkpoints.read_arrays(chosen, trees)
            if "best" in trees:
                best["state"] = wrap_keys(held["best"], whole)
            arrays = layout.deal(held["state"]) if is_dealt else held["state"]
            self.carry = copy_arrays(wrap_keys(arrays, self.carry))
            self.at = Position(*run["position"])
            self.history = History(dict(zip(run["names"], rows, strict=True)), run["epochs"])
            self.best = best if is_kept else self._best_so_far()
            if isinstance(self.feed, StreamFeed):
                self.feed.go_to(self.at, run["iterator"])

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Trains until the end of a number of epochs or steps, whichever comes first."""
        self._since, stop, code = time.perf_counter(), False, 0
        error: BaseException | None = None
        goes_on = self.at.epoch <= epochs and self.at.step < steps
        if goes_on and self.at.offset and self._row is not None and not self._evaluates:
            row = self.history.epoch_rows.pop()  # of a part: the epoch gets one row when it is over
            self.at = self.at._replace(seconds=self.at.seconds + row["seconds"])
        if self.at.step and self._row is None and (not self.at.offset or self._evaluates):
            self._add_row()  # an error came between a step and its row
            stop = self._call_row(is_end=not self.at.offset)
        due = [f for n, f in self.every.items() if self.at.step % n == 0]
        early = [f for f in (*self.epoch_end, *sum(due, ())) if isinstance(f, EarlyStopping)]
        if self._row is not None and wants_to_stop("", tuple(early), self._event(dict, True)):
            return "stopped"  # where the run that is resumed had stopped
        compiled = compile_steps(self.model, self.layout, self.carry, self.feed.rows)
        while self.at.epoch <= epochs and self.at.step < steps:
            code = _FAILED if error else interrupt.number or _STOPPED * int(stop)
            code = int(processes.gather(np.int32(code)).max())
            if code:
                break
            try:
                if not self.at.offset:
                    self._start_epoch()
                limit = self._limit(steps)
                fed = self.feed.run(compiled, self.carry, self.at, limit, interrupt)
                stop, error = self._after(fed, steps), fed.error
            except (Exception, SystemExit) as raised:  # what has been trained is saved first
                error = raised
        if code == _FAILED and error is None:
            error = RuntimeError("another process has failed: see what it says.")
        if error is not None:
            self._rescue(error)
            raise error
        interrupt.number = interrupt.number or (0 if code == _STOPPED else code)
        return "finished" if not code else "stopped" if code == _STOPPED else "interrupted"

    def _limit(self, steps: float) -> int:
        """How many steps may be taken until something happens."""
        at, dues = self.at.step, (self.eval_every, self.checkpoint_every, *self.every)
        return int(min(self.steps_per_call, steps - at, *(n - at % n for n in dues)))

    def _start_epoch(self) -> None:
        self._warn_if_still()
        change, carry, layout = self.epoch_start, self.carry, self.layout
        if change is not None and takes_epoch(change):  # else it is the change itself
            change = change(self.at.epoch)
        if change is None:
            return
        checks.check_function("epoch_start's result", change, "(opt_state, params, full_grad)")
        if self.show is not None:
            self.show(self.at.step, f"epoch {self.at.epoch} full gradient")
        with layout.context():
            bound = jax.tree_util.Partial(self.model, carry.model_state, carry.step_rng())
            batches = self.feed.all_batches(self.at.epoch)
            grad = full_gradient(bound, carry.params, batches, has_aux=True)
            there = layout.mesh and jax.tree.map(lambda leaf: leaf.sharding, carry.opt_state)
            opt_state = jax.jit(change, out_shardings=there)(carry.opt_state, carry.params, grad)
        says = "The optimizer state that epoch_start's function returned"
        checks.check_same_tree(says, opt_state, carry.opt_state, source="the one before")
        # It may share the params' memory.
        self.carry = copy_arrays(carry.replace(opt_state=opt_state))

    def _after(self, fed: Fed, steps: float) -> bool:
        """What happens after some steps; whether a callback wants to stop."""
        stop, at = False, self.at
        epoch, offset = (at.epoch + 1, 0) if fed.is_over else (at.epoch, at.offset + fed.steps)
        self.carry, self.at = fed.carry, Position(at.step + fed.steps, epoch, offset, at.seconds)
        if offset == 0:  # the epoch's seconds are those of its steps, which may still be under way
            jax.block_until_ready(fed.columns)
        self._tick()
        self.history.add_steps(fed.columns, fed.steps)
        if fed.columns and self.show is not None:
            self._say(self.history.means(1))
        # That an epoch was over may be found only when a batch more is asked for.
        is_end = fed.is_over or self.at.step >= steps
        if is_row := (is_end or self._evaluates) and self._row is None:
            self._add_row()
        for n in [n for n in self.every if fed.columns and self.at.step % n == 0]:
            event = self._event(functools.partial(self.history.means, n, self.history.num_steps))
            stop |= wants_to_stop(f"every[{n}]", self.every[n], event)
        if is_end or is_row:
            stop |= self._call_row(is_end)
        if self.checkpoints is not None and self.at.step % self.checkpoint_every == 0:
            self._save(self.checkpoints)
        return stop

    @property
    def _evaluates(self) -> bool:
        """Whether `eval_every` asks for a row after the last step."""
        return self.at.step % self.eval_every == 0

    def _add_row(self) -> None:
        """Adds a row to the history, with an evaluation."""
        evaluated, at = self._evaluate() if self.evaluate else {}, self.at
        self.history.add_epoch(self._epoch, at.step, at.seconds, evaluated)
        self._say(self._metrics_of_row())
        warn_of_samplers(self.carry.opt_state)
        if len(self.history.epoch_rows) == 1 and self.epoch_start is None:
            for state in find_states(self.carry.opt_state, SvrgState):
                advice = "pass epoch_start=optperm.take_snapshot to take one before each epoch"
                warn_without(state.snapshot, advice, stacklevel=6)  # where fit is called
        for half in find_states(self.carry.opt_state, RecommendationState):
            if not self.is_past_end and int(np.max(half.steps_past_end)) > 0:
                self.is_past_end = True
                says = "sgperm is past its num_steps: it goes on with the last aggressiveness."
                warnings.warn(says, stacklevel=5)  # where fit is called
        if self.keep_best:
            self._keep_if_best(*self.keep_best)

    def _keep_if_best(self, name: str, mode: str) -> None:
        if name not in self.history.last:
            known = ", ".join(map(repr, self.history.last))
            raise ValueError(f"keep_best is {name!r}, but the rows of the history have {known}.")
        value = self.history.last[name] * (1.0 if mode == "min" else -1.0)
        if value < self.best.get("value", math.inf):
            state = copy_arrays(merge_replicas(self.carry, self.layout))
            self.best = {"value": value, "step": self.at.step, "state": state}

    def _best_so_far(self) -> dict[str, Any]:
        """Return what has to be beaten where the params of the best row so far were not kept."""
        name, mode = self.keep_best or ("", "")
        column = self.history.epochs.get(name, np.zeros(0)) * (1.0 if mode == "min" else -1.0)
        if not np.any(column < math.inf):
            return {}
        best = int(np.nanargmin(column))
        step = self.history.epochs["step"][best]
        warnings.warn(
            "keep_best is new to this run: the params of the best row so far, of step "
            f"{step}, were not kept. Until a row beats that one best_state is None.",
            RuntimeWarning,
            stacklevel=5,  # where fit is called
        )
        return {"value": float(column[best])}

    def _metrics_of_row(self) -> dict[str, float]:
        return {k: v for k, v in self.history.last.items() if k not in ("epoch", "step")}

    def _call_row(self, is_end: bool) -> bool:
        """Calls the functions of `on_epoch_end`; within an epoch those that look at every row."""
        callbacks = tuple(f for f in self.epoch_end if is_end or isinstance(f, OF_ROWS))
        stop = wants_to_stop("on_epoch_end", callbacks, self._event(self._metrics_of_row, True))
        self.at, self._since = self.at._replace(seconds=0.0), time.perf_counter()
        return stop

    @property
    def _epoch(self) -> int:
        """The epoch of the last step."""
        return self.at.epoch if self.at.offset else self.at.epoch - 1

    @property
    def _row(self) -> dict[str, float] | None:
        """The row of an epoch that ended with the last step, if one did."""
        row = self.history.last
        return row if row.get("step") == self.at.step else None

    def _say(self, metrics: Mapping[str, float]) -> None:
        if self.show is None:
            return
        text = [f"epoch {self._epoch}", *(f"{name} {v:.4g}" for name, v in metrics.items())]
        self.show(self.at.step, " ".join(text))

    def _event(self, metrics: Callable[[], Mapping[str, float]], is_row: bool = False) -> Event:
        where = self._epoch, self.at.step, self.history, is_row
        return Event(*where, metrics, self._shown, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            raise ValueError("There is nothing to evaluate: pass eval_fn and eval_data to fit.")
        return self.evaluate(state=merge_replicas(self.carry, self.layout), epoch=self._epoch)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.at = self.at._replace(seconds=self.at.seconds + now - self._since)
        self._since = now

    def _shown(self) -> Any:
        """A new train state, or a new model, of arrays of its own."""
        return self._brought_home(copy_arrays(merge_replicas(self.carry, self.layout)))

    def _brought_home(self, state: TrainState) -> Any:
        return self.model.shown(self.layout.bring_home(state))

    def _save(self, checkpoints: Checkpoints) -> None:
        self._tick()
        # Copies, as they are written while training goes on.
        run: dict[str, Any] = {"facts": self.facts, "position": list(self.at)}
        run |= {"names": list(self.history.steps), "epochs": list(self.history.epoch_rows)}
        iterator = self.feed.state() if isinstance(self.feed, StreamFeed) else None
        run |= {"iterator": iterator, "replicas": self.layout.parts}
        run["best"] = {name: value for name, value in self.best.items() if name != "state"}
        run["best"]["by"] = list(self.keep_best or ())
        trees = {"state": unwrap_keys(self.carry)}
        trees |= {"best": unwrap_keys(self.best["state"])} if "state" in self.best else {}
        rows = np.array(list(self.history.steps.values()), np.float32)
        checkpoints.write(self.at.step, trees, rows, run)

    def _warn_if_still(self) -> None:
        """Warns once if a method that permutes weights hardly moves them any more, and goes on."""
        if self.is_still or self.history.num_steps < 2 * _WINDOW:
            return
        first, last = self.history.means(_FIRST, _FIRST), self.history.means(_WINDOW)
        moved = first.get("share_moved", 0.0), last.get("share_moved", 1.0)
        self.is_still = moved[1] <= _STILL * moved[0]
        if self.is_still:
            warnings.warn(
                f"After step {self.at.step} the weights hardly trade places any more: {moved[1]:.1%} of "
                f"them a step, {moved[0]:.1%} at first. Pass optperm.sgperm num_steps, the steps of the "
                "whole run, or a larger min_aggressiveness.",
                stacklevel=5,  # where fit is called
            )

    def warn_if_diverged(self) -> None:
        """Says since when the loss is not finite, if it is not any more."""
        if (row := find_divergence(self.history)) is not None:
            step = self.at.step - self.history.num_steps + row
            warnings.warn(
                f"The loss is {self.history.steps['loss'][-1]} at the end, and stopped being finite at "
                f"step {step} of {self.at.step}: try a smaller learning rate, and look for examples "
                "that are not finite.",
                RuntimeWarning,
                stacklevel=3,  # where fit is called
            )

    def _rescue(self, error: BaseException) -> None:
        """Saves what has been trained before an error is raised."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.carry)):
            return
        try:
            result = self.result("stopped")
        except CheckpointError as other:
            result = other.result
            if not isinstance(error, CheckpointError):
                error.add_note(f"What had been trained could not be saved: {other}")
        if isinstance(error, CheckpointError):
            error.result = result

    def result(self, ended: Ended) -> FitResult:
        """What `fit` returns, once a model of `flax.nnx` and the last checkpoint have come so far."""
        state = self.layout.bring_home(merge_replicas(self.carry, self.layout))
        source, optimizer = self.source
        if self.model.graphdef is not None:
            own = copy_arrays(state)
            nnx.update(source, own.params, own.model_state[1])
            nnx.update(optimizer.opt_state, nnx.state(own.opt_state))
            optimizer.step.set_value(own.step)
        is_linen, at = self.model.graphdef is None, self.at
        result = FitResult(
            state if is_linen else None,
            None if is_linen else source,
            optimizer,
            self.history,
            ended,
            at.epoch - 1,
            at.step,
            self._brought_home(self.best["state"]) if "state" in self.best else None,
            self.best.get("step"),
        )
        if self.checkpoints is not None:
            try:
                self._save(self.checkpoints)
                self.checkpoints.close()
            except CheckpointError as error:
                error.result = result
                raise
        return result
