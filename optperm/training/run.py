"""One run of `fit`: its steps, and what happens between them."""

import dataclasses
import functools
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
from optperm.training import processes
from optperm.training.callbacks import EarlyStopping, Event, as_callbacks, wants_to_stop
from optperm.training.checkpoints import CheckpointError, Checkpoints, differences
from optperm.training.data import ArrayFeed, Fed, Position, StreamFeed, is_arrays, takes_epoch
from optperm.training.history import History, diverged_at
from optperm.training.layout import Layout, layout_of
from optperm.training.steps import (
    copied,
    evaluated,
    model_of,
    moved,
    placed,
    plain,
    steps_of,
    trained,
    typed,
)
from optperm.training.terminal import Interrupt
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient
from optperm.variance.snapshots import SvrgState
from optperm.variance.svrg import warn_without

Facts = Callable[[], dict[str, Any]]  # tell batches from others
# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]
_ENDED: tuple[Ended, ...] = ("finished", "stopped", "interrupted")
# Arguments of `fit` that are numbers from 1 on.
COUNTS = (
    *("epochs", "steps", "steps_per_call", "eval_batch_size", "checkpoint_every"),
    "checkpoint_keep",
)


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` came to, and what it goes on from.

    Attributes:
      state: The trained `TrainState`; None for a model of `flax.nnx`. Of replicas that train each by
        itself (`optperm.agn`, `optperm.diloco`) its params are the center's, its model state the mean.
      model: The trained model of `flax.nnx`, the one that was passed; None for a `TrainState`.
      optimizer: Its optimizer; None for a `TrainState`.
      history: What was recorded.
      ended: `"finished"`, `"stopped"` by a callback, or `"interrupted"` by Ctrl-C or SIGTERM.
      epoch: Whole epochs done, since the start of the first run.
      step: Steps done, likewise.
    """

    state: TrainState | None
    model: Any
    optimizer: Any
    history: History
    ended: Ended
    epoch: int
    step: int
    # Where and what another run goes on with, from where, and with which batches.
    _end: tuple[Layout, TrainState, Position, Facts, StreamFeed | None] = dataclasses.field(
        repr=False
    )


class Run:
    """One call of `fit`: what is trained, where, by which batches, and what happens meanwhile."""

    checkpoints: Checkpoints | None = None
    show: Any = None

    def __init__(self, given: Any) -> None:
        """`given` has the arguments of `fit`."""
        source, optimizer, earlier = given.state_or_model, given.optimizer, None
        if isinstance(source, FitResult):
            earlier, optimizer = source, source.optimizer
            source = earlier.state or earlier.model
        self.source, has_aux = (source, optimizer), bool(given.has_aux)
        self.model, initial = model_of(source, optimizer, given.loss_fn, has_aux)
        places = {name: getattr(given, name) for name in ("mesh", "devices", "replicas")}
        if earlier is None or any(place is not None for place in places.values()):
            self.layout = layout_of(initial.tx, initial, **places)
        else:
            self.layout = earlier._end[0]
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
        self.carry = moved(*earlier._end[:2], layout) if earlier else placed(initial, layout)
        self.steps_per_call, self.epoch_start = int(given.steps_per_call), given.epoch_start
        self.feed: ArrayFeed | StreamFeed
        if is_arrays("train_data", data):
            draws = bool(find_states(self.carry.opt_state, SAMPLERS))
            self.feed = ArrayFeed(data, size, int(given.seed), layout, self.steps_per_call, draws)
        else:
            before = earlier._end[4] if earlier else None
            self.feed = StreamFeed(data, size, layout, before)
        if jax.process_count() > 1:
            processes.check_same(self.feed.facts())
        whole: Any = {"model": self.model, "layout": Layout(layout.mesh, layout.batch)}
        evaluate = functools.partial(evaluated, batch_size=given.eval_batch_size or size, **whole)
        self.evaluate = given.eval_fn and functools.partial(
            evaluate, given.eval_fn, given.eval_data
        )
        every = (given.every or {}).items()
        self.every = {int(n): as_callbacks(f"every[{n}]", f) for n, f in every}
        self.epoch_end = as_callbacks("on_epoch_end", given.on_epoch_end)
        old = earlier.history if earlier else History()
        self.at = earlier._end[2] if earlier else Position()
        if earlier is not None:
            self._check_earlier(earlier, initial)
        self.history = History(old.steps, old.epoch_rows)
        if given.checkpoints is not None:
            of_folder = given.checkpoint_every, given.checkpoint_keep
            self.checkpoints = Checkpoints(given.checkpoints, *of_folder)
            self._resume(self.checkpoints, given.resume)

    def _check_earlier(self, earlier: FitResult, initial: TrainState) -> None:
        """Raises a ValueError unless going on with an earlier result is what would have come next."""
        layout, carry, at, facts, _ = earlier._end
        each = trained(carry, layout), initial
        if len({processes.digest((state.params, state.opt_state)) for state in each}) > 1:
            raise ValueError(
                "The params or the optimizer state have changed since the earlier fit, which its result "
                "would undo: pass the TrainState, or the model and its optimizer, to begin anew from "
                "those."
            )
        if at.offset and (which := differences(facts(), self.feed.facts())):
            raise ValueError(
                f"The earlier fit ended after {at.offset} steps of epoch {at.epoch}, which goes on with "
                f"its own batches, but {which}. Pass what that fit was given, or end it with an epoch, "
                "by epochs, before data are others."
            )

    def _resume(self, checkpoints: Checkpoints, resume: bool | int) -> None:
        """Goes to a checkpoint, if that is asked for, of a run that agrees with this one."""
        arrays, layout = plain(self.carry), self.layout
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
            held, rows = checkpoints.read_arrays(chosen, like)
            arrays = layout.deal(held) if is_dealt else held
            self.carry, self.at = copied(typed(arrays, self.carry)), Position(*run["position"])
            self.history = History(dict(zip(run["names"], rows, strict=True)), run["epochs"])
            if isinstance(self.feed, StreamFeed):
                self.feed.go_to(self.at, run["iterator"])

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Trains until the end of a number of epochs or steps, whichever comes first."""
        self._since, stop, code = time.perf_counter(), False, 0
        error: BaseException | None = None
        if self.at.epoch <= epochs and self.at.step < steps:
            self._drop_part()
        if self.at.step and not self.at.offset and self._row is None:
            stop = self._end_epoch()  # an error came between the epoch's last step and its row
        early = [callback for callback in self.epoch_end if isinstance(callback, EarlyStopping)]
        is_between = self.history.last and not self.at.offset
        if is_between and wants_to_stop("on_epoch_end", tuple(early), self._event(dict)):
            return "stopped"
        compiled = steps_of(self.model, self.layout, self.carry, self.feed.rows)
        while self.at.epoch <= epochs and self.at.step < steps:
            # In any process 3 is a failure, 2 a signal, and 1 a callback that wants to stop.
            code = 3 if error else 2 if interrupt.requested else int(stop)
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
        if code == 3 and error is None:
            error = RuntimeError("another process has failed: see what it says.")
        if error is not None:
            self._rescue(error)
            raise error
        return _ENDED[code]

    def _drop_part(self) -> None:
        """Forgets the row of a part of an epoch, which goes on: it gets one row when it is over."""
        if self.at.offset and self._row is not None:
            row = self.history.epoch_rows.pop()
            self.at = self.at._replace(seconds=self.at.seconds + row["seconds"])

    def _limit(self, steps: float) -> int:
        """How many steps may be taken until something happens."""
        at = self.at.step
        most = min(self.steps_per_call, steps - at, *(n - at % n for n in (2**31, *self.every)))
        return int(most) if self.checkpoints is None else self.checkpoints.until_next(at, int(most))

    def _start_epoch(self) -> None:
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
        self.carry = copied(carry.replace(opt_state=opt_state))  # it may share the params' memory

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
        for n in [n for n in self.every if fed.columns and self.at.step % n == 0]:
            event = self._event(functools.partial(self.history.means, n, self.history.num_steps))
            stop |= wants_to_stop(f"every[{n}]", self.every[n], event)
        # That an epoch was over may be found only when a batch more is asked for.
        is_end = fed.is_over or self.at.step >= steps
        if is_end and self._row is None:
            stop |= self._end_epoch()
        if self.checkpoints is not None and self.checkpoints.is_due(self.at.step, self._row):
            self._save(self.checkpoints)
        return stop

    def _end_epoch(self) -> bool:
        evaluated, at = self._evaluate() if self.evaluate else {}, self.at
        self.history.add_epoch(self._epoch, at.step, at.seconds, evaluated)
        metrics = {k: v for k, v in self.history.last.items() if k not in ("epoch", "step")}
        self._say(metrics)
        warn_of_samplers(self.carry.opt_state)
        if self._epoch == 1 and self.epoch_start is None:
            for state in find_states(self.carry.opt_state, SvrgState):
                advice = "pass epoch_start=optperm.take_snapshot to take one before each epoch"
                warn_without(state.snapshot, advice, stacklevel=6)  # where fit is called
        stop = wants_to_stop("on_epoch_end", self.epoch_end, self._event(lambda: metrics))
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

    def _event(self, metrics: Callable[[], Mapping[str, float]]) -> Event:
        history = self.history
        return Event(self._epoch, self.at.step, history, metrics, self._shown, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self.evaluate is None:
            raise ValueError("There is nothing to evaluate: pass eval_fn and eval_data to fit.")
        return self.evaluate(state=trained(self.carry, self.layout), epoch=self._epoch)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.at = self.at._replace(seconds=self.at.seconds + now - self._since)
        self._since = now

    def _shown(self) -> Any:
        """A new train state, or a new model, of arrays of its own."""
        return self.model.shown(self.layout.bring_home(copied(trained(self.carry, self.layout))))

    def _save(self, checkpoints: Checkpoints) -> None:
        self._tick()
        # Copies, as they are written while training goes on.
        run: dict[str, Any] = {"facts": self.facts, "position": list(self.at)}
        run |= {"names": list(self.history.steps), "epochs": list(self.history.epoch_rows)}
        iterator = self.feed.state() if isinstance(self.feed, StreamFeed) else None
        run |= {"iterator": iterator, "replicas": self.layout.parts}
        rows = np.array(list(self.history.steps.values()), np.float32)
        checkpoints.write(self.at.step, plain(self.carry), rows, run, self._row)

    def warn_if_diverged(self) -> None:
        """Says since when the loss is not finite, if it is not any more."""
        if (row := diverged_at(self.history)) is not None:
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
        if "is not bound here" in str(error):
            error.add_note("fit maps over an axis with devices, mesh or replicas.")
        if "needs the extra argument full_grad_fn" in str(error):
            # In the message, as not all who show it show notes, and what it advises is for loops.
            error.args = (
                "fit takes full gradients between steps: leave out refresh_every and "
                "refresh_probability, and pass epoch_start=optperm.take_snapshot. Without fit, "
                f"{error}",
            )
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
        state, (source, optimizer) = (
            self.layout.bring_home(trained(self.carry, self.layout)),
            self.source,
        )
        if self.model.graphdef is not None:
            own = copied(state)
            nnx.update(source, own.params, own.model_state[1])
            nnx.update(optimizer.opt_state, nnx.state(own.opt_state))
            optimizer.step.set_value(own.step)
        is_linen, at = self.model.graphdef is None, self.at
        stream = self.feed if isinstance(self.feed, StreamFeed) else None
        result = FitResult(
            state if is_linen else None,
            None if is_linen else source,
            optimizer,
            self.history,
            ended,
            at.epoch - 1,
            at.step,
            (self.layout, self.carry, at, self.feed.facts, stream),
        )
        if self.checkpoints is not None:
            try:
                self._save(self.checkpoints)
                self.checkpoints.close()
            except CheckpointError as error:
                error.result = result
                raise
        return result
