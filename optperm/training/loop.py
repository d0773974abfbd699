"""`fit`: trains a Flax model by any method."""

import dataclasses
import inspect
import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from optperm.contract import checks
from optperm.training import checkpoints as kept_runs
from optperm.training import data as datas
from optperm.training import processes
from optperm.training.callbacks import (
    Callback,
    EarlyStopping,
    Event,
    as_callbacks,
    by_interval,
    wants_to_stop,
)
from optperm.training.evaluations import Evaluator
from optperm.training.feeds import ArrayFeed, Fed, StreamFeed
from optperm.training.history import History
from optperm.training.interrupt import Interrupt
from optperm.training.layout import Layout, layout_of
from optperm.training.progress import Bar, NoBar, check_progress, line, progress_bar
from optperm.training.steps import Subject, copied, plain, steps_of, trained_of, typed
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient

_MANY = 2**31 - 1
# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]
# From the optimizer's state, the params and the full gradient, the state to go on with.
Change = Callable[[Any, Any, Any], Any]


@dataclasses.dataclass(frozen=True)
class Position:
    """How far training has come.

    Attributes:
      step: Steps taken.
      epoch: The epoch of the next step, from 1.
      offset: Steps taken within it.
    """

    step: int = 0
    epoch: int = 1
    offset: int = 0

    def after(self, steps: int, *, is_over: bool) -> "Position":
        """The position some steps later, in the same epoch or at the start of the next."""
        if is_over:
            return Position(self.step + steps, self.epoch + 1, 0)
        return Position(self.step + steps, self.epoch, self.offset + steps)

    @property
    def last_epoch(self) -> int:
        """The epoch of the last step."""
        return self.epoch if self.offset else self.epoch - 1


@dataclasses.dataclass(frozen=True)
class FitResult:
    """What `fit` came to, and what it goes on from.

    Attributes:
      state: The trained `TrainState`; None for a model of `flax.nnx`. Where replicas train each by
        itself (`optperm.agn`, `optperm.diloco`), its params are the center's, its model state the mean,
        and its optimizer's state that of one of them.
      model: The trained model of `flax.nnx`, the one that was passed; None for a `TrainState`.
      optimizer: Its optimizer; None for a `TrainState`.
      history: What was recorded.
      ended: `"finished"` after as many epochs or steps as were asked for, `"stopped"` by a callback, or
        `"interrupted"` by Ctrl-C or SIGTERM.
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
    _standing: "Standing" = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Standing:
    """What a run leaves for one that goes on from it.

    Attributes:
      source: The state or model that was passed.
      optimizer: The optimizer of a model.
      layout: Where the carry lies.
      carry: The carry, of each replica where they differ.
      at: How far it has come.
      seconds: Wall time since the last row of an epoch.
      feed: Where a stream of batches has come.
    """

    source: Any
    optimizer: Any
    layout: Layout
    carry: Any
    at: Position
    seconds: float
    feed: StreamFeed | None


def fit(
    state_or_model: Any,
    loss_fn: Callable[..., Any],
    train_data: Any,
    *,
    optimizer: nnx.Optimizer[Any] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    has_aux: bool = False,
    eval_fn: Callable[..., Any] | None = None,
    eval_data: Any = None,
    eval_batch_size: int | None = None,
    mesh: jax.sharding.Mesh | jax.sharding.NamedSharding | None = None,
    devices: int | None = None,
    replicas: int | None = None,
    every: Mapping[int, Any] | None = None,
    epoch_start: Callable[..., Any] | None = None,
    on_epoch_end: Any = None,
    checkpoints: Any = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    resume: bool | int = False,
    progress: bool | str = False,
    steps_per_call: int = 100,
) -> FitResult:
    r"""Trains a linen `TrainState`, or a model of `flax.nnx` with its optimizer.

    Every step is `optperm.evaluate` on one batch, the method's update with all extra arguments it may
    ask for, and `optperm.apply_updates`. Line searches and second gradients within a step see the batch
    statistics and the random key of that step; only the main evaluation's new batch statistics are kept.

    On a mesh one program runs on all devices: batches are sharded, the state lies as it did when it was
    passed (replicated, or sharded by parameters), and the result is that of one device: BatchNorm and
    dropout see the whole batch. A method that was built with the name of a mapped axis runs by
    `jax.shard_map` over that axis of the mesh instead, each device with its part of a batch.
    `optperm.agn` and `optperm.diloco` are such, and each replica has params of its own.

    Args:
      state_or_model: A `TrainState`, which is left alone; or a model of `flax.nnx`, which is trained in
        place, with its `optimizer`; or what an earlier `fit` returned, to go on from exactly there.
      loss_fn: For a `TrainState` `loss_fn(params, batch)`, as `optperm.evaluate` takes it: the scalar
        mean loss. It may take `model_state` by name as well, and then returns `(loss, new_model_state)`,
        and `rng`, a key of each step, drawn from the state's. For a model of `flax.nnx`
        `loss_fn(model, batch)`, which may change the model's state.
      train_data: A tree of arrays that agree in their leading axis (a dict, a tuple or an array),
        shuffled anew each epoch by `seed` alone (`optperm.training.shuffled`); a last part that fills no
        batch is left out. Or an iterable of batches (a list, a data loader), gone through in each epoch.
        Or a function of the epoch's number, from 1, that gives such an iterable. No batch is taken from
        an iterator before the step that needs it.
      optimizer: The `nnx.Optimizer` of the model. Weights are placed exactly with any.
      epochs: When to end, counted from the start of the first run.
      steps: Likewise, in steps; with both, whatever comes first.
      batch_size: Examples a step of all devices together, for arrays.
      seed: Seed of the shuffles.
      has_aux: Whether `loss_fn` returns metrics as well, as the last of a tuple: a dict of scalars, the
        means over the batch.
      eval_fn: What to evaluate at the end of each epoch, like `loss_fn`: `eval_fn(params, batch)`, which
        may take `model_state`, or `eval_fn(model, batch)`. It returns a dict of scalars.
      eval_data: What to evaluate on: arrays, an iterable of batches, or a function of the epoch's
        number. The means are over examples. All devices share each batch.
      eval_batch_size: Examples at once, for arrays; `batch_size` by default.
      mesh: A `jax.sharding.Mesh`, whose first axis (or that which the method names) shards batches, or
        the `NamedSharding` of a batch. By default the mesh on which the state is sharded, if it is.
      devices: Short for a mesh of so many devices of each process, along the axis `"replica"`. Over
        several processes (`jax.distributed`), one of each by default. In-memory data are the same in all
        processes; an iterable brings in each its own part of a batch, all of one size.
      replicas: How many replicas of `optperm.agn`, `optperm.diloco` or another method with
        `axis_name="replica"` to simulate on one device.
      every: Functions of an `Event`, or lists of such, by the number of steps between their calls:
        `{100: log, 1000: evaluate}`. True stops. With several processes all of them call them.
      epoch_start: A function `change(opt_state, params, full_gradient)` that gives the optimizer state
        with which each epoch begins, such as `optperm.take_snapshot`, for SVRG; the gradient is over all
        training examples. Or a function of the epoch's number that gives such a function, or None.
      on_epoch_end: A function of an `Event`, or a list of such, called after each epoch and its
        evaluation. True stops. See `EarlyStopping` and `metrics_writer`.
      checkpoints: Where to keep checkpoints, named by their steps: a folder (of any file system that
        `etils.epath` knows, `gs://` too), or an `orbax.checkpoint.CheckpointManager`.
      checkpoint_every: After how many steps each to write one into a folder; one is written in any case
        when training ends, by an error of a callback, of the data or of `loss_fn` too.
      checkpoint_keep: How many of the newest to keep in a folder; None for all.
      resume: Whether to go on from the newest checkpoint, if there is one, or from that of a step; what
        was kept after that step is overwritten. On the same devices it ends bit for bit as if it had
        never stopped. What `loss_fn` computes and the method's hyperparameters are not compared.
      progress: Whether to show a bar: True or `"rich"`, or `"tqdm"`.
      steps_per_call: The most steps by one call of a compiled program, for arrays. Ctrl-C and SIGTERM
        take effect after a call; a second Ctrl-C at once.

    Returns:
      A `FitResult`.

    Raises:
      TypeError: If an argument is of the wrong type, or a function returns something else than it must.
      ValueError: If an argument is out of range or does not fit another one, data hold no examples, a
        checkpoint is of another run, or several processes disagree on params, data or arguments.
      CheckpointError: If a checkpoint cannot be written or read; nothing can be written into a folder is
        found before the first step.
      ImportError: If what a progress bar or checkpoints need is not installed, with its name.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, optperm
      >>> from optperm.training import TrainState, fit
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> data = {"x": x, "y": x @ jnp.array([[1.0], [-2.0], [0.5]])}
      >>> model = nn.Dense(1)
      >>> state = TrainState.create(
      ...     apply_fn=model.apply, params=model.init(jax.random.key(1), x)["params"],
      ...     tx=optperm.dldr(optax.sgd(0.1), sample_every=2, num_samples=5, n_components=4),
      ... )
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
      >>> result = fit(state, loss_fn, data, epochs=8, batch_size=32)
      >>> bool(result.history.epochs["loss"][-1] < 1e-3)
      True
      >>> result = fit(result, loss_fn, data, epochs=10, batch_size=32)  # two more
      >>> int(result.state.step)
      20
    """
    counts = {"epochs": epochs, "steps": steps, "eval_batch_size": eval_batch_size}
    counts |= {"checkpoint_every": checkpoint_every, "checkpoint_keep": checkpoint_keep}
    for name, number in {**counts, "steps_per_call": steps_per_call}.items():
        if number is not None:
            checks.check_count(name, number)
    checks.check_seed("seed", seed)
    if epochs is None and steps is None:
        raise ValueError("Pass epochs or steps: how long to train.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}.")
    checks.check_flag("has_aux", has_aux)
    kept_runs.check_arguments(checkpoints, checkpoint_every, checkpoint_keep, resume)
    bar_name = check_progress(progress)
    run = Run(
        state_or_model,
        loss_fn,
        train_data,
        optimizer=optimizer,
        batch_size=batch_size,
        seed=int(seed),
        has_aux=bool(has_aux),
        placing={"mesh": mesh, "devices": devices, "replicas": replicas},
        steps_per_call=int(steps_per_call),
        epoch_start=epoch_start,
        every=by_interval(every),
        epoch_end=as_callbacks("on_epoch_end", on_epoch_end),
    )
    if eval_fn is not None or eval_data is not None:
        if eval_fn is None or eval_data is None:
            missing = "eval_fn" if eval_fn is None else "eval_data"
            raise ValueError(f"eval_fn and eval_data go together: pass {missing} as well.")
        run.evaluate_on(eval_fn, eval_data, eval_batch_size or batch_size)
    processes.check_same({**run.facts, **counts, "steps_per_call": steps_per_call})
    if checkpoints is not None:
        run.keep_in(checkpoints, checkpoint_every, checkpoint_keep, resume)
    total = run.total_steps(epochs, steps)
    with (
        Interrupt() as interrupt,
        progress_bar(bar_name if jax.process_index() == 0 else None, total) as run.bar,
    ):
        ended = run.train(
            math.inf if epochs is None else epochs, math.inf if steps is None else steps, interrupt
        )
    return run.result(ended)


class Run:
    """One call of `fit`: what is trained, where, by which batches, and what happens meanwhile."""

    def __init__(
        self,
        source: Any,
        loss_fn: Callable[..., Any],
        train_data: Any,
        *,
        optimizer: Any,
        batch_size: int | None,
        seed: int,
        has_aux: bool,
        placing: dict[str, Any],
        steps_per_call: int,
        epoch_start: Any,
        every: dict[int, tuple[Callback, ...]],
        epoch_end: tuple[Callback, ...],
    ) -> None:
        earlier = source._standing if isinstance(source, FitResult) else None
        self._source = source if earlier is None else earlier.source
        self._optimizer = optimizer if earlier is None else earlier.optimizer
        self._loss_fn, self._has_aux, self._steps_per_call = loss_fn, has_aux, steps_per_call
        self._every, self._epoch_end = every, epoch_end
        self._subject, carry = Subject.of(self._source, self._optimizer)
        self._layout = self._layout_of(carry, placing)
        if epoch_start is not None and self._layout.own:
            raise ValueError(
                "epoch_start changes a state that all replicas share, but by this method each has its "
                "own."
            )
        self._epoch_start = _changes(epoch_start)
        self._feed: ArrayFeed | StreamFeed
        if datas.is_arrays(train_data):
            if batch_size is None:
                raise ValueError("Pass batch_size: train_data are arrays, and a step takes a part.")
            self._feed = ArrayFeed(
                train_data,
                batch_size=batch_size,
                seed=seed,
                layout=self._layout,
                steps_per_call=steps_per_call,
            )
        else:
            self._feed = StreamFeed(train_data, layout=self._layout)
            if batch_size is not None:
                raise ValueError(
                    "batch_size is for arrays: train_data gives batches, and their size is theirs."
                )
        self._evaluator: Evaluator | None = None
        self._checkpoints: kept_runs.Checkpoints | None = None
        self.bar: Bar = NoBar()
        self.facts = self._facts_of(carry, train_data, batch_size, seed)
        if earlier is None:
            self.history, self._at, self._seconds = History(), Position(), 0.0
            self._carry = self._initial(carry)
        else:
            self.history, self._at = source.history.copy(), earlier.at
            self._seconds, self._carry = earlier.seconds, self._taken_over(earlier)
            if isinstance(self._feed, StreamFeed):
                self._feed.take_over(earlier.feed)
        self._saved = -1
        self._iterator: str | None = None

    def _layout_of(self, carry: Any, placing: dict[str, Any]) -> Layout:
        params = self._subject.parts(carry).params
        return layout_of(self._subject.tx(carry), params, jax.tree.leaves(carry), **placing)

    def _facts_of(
        self, carry: Any, train_data: Any, batch_size: int | None, seed: int
    ) -> dict[str, Any]:
        """What tells the run from others: JSON values."""
        facts: dict[str, Any] = {"the kind of model": self._subject.kind, "seed": seed}
        if isinstance(self._feed, ArrayFeed):
            shapes = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", train_data)
            facts |= {"batch_size": int(batch_size or 0), "train_data": str(shapes)}
        else:
            facts["train_data"] = "an iterable of batches"
        if self._layout.own:
            facts["the number of replicas"] = self._layout.parts
        return facts

    def _initial(self, carry: Any) -> Any:
        """The carry before the first step, placed."""
        subject, layout = self._subject, self._layout
        placed = typed(layout.place(plain(carry)), carry)
        parts = subject.parts(placed)
        has_state = parts.opt_state is not None
        with layout.context():
            if not has_state and not layout.mapped:
                opt_state = subject.tx(placed).init(parts.params)
                return copied(subject.with_parts(placed, parts._replace(opt_state=opt_state)))
            if layout.own:
                placed = layout.stack(placed)
            if has_state:
                return copied(placed)

            def init(carry: Any, _: Any, __: Any) -> tuple[Any, Any]:
                parts = subject.parts(carry)
                opt_state = subject.tx(carry).init(parts.params)
                return subject.with_parts(carry, parts._replace(opt_state=opt_state)), ()

            return jax.jit(layout.spread(init, 0))(placed, (), ())[0]

    def _taken_over(self, earlier: Standing) -> Any:
        """The carry of an earlier run, placed for this one.

        Raises:
          ValueError: If each replica had its own, and there are now more or fewer.
        """
        before, now = earlier.layout, self._layout
        if (before.own or now.own) and (before.own, before.parts) != (now.own, now.parts):
            raise ValueError(
                f"The earlier fit trained {before.parts} replicas, each with a state of its own, and "
                "this one cannot go on with another number of them: pass the same, or begin anew from "
                "its state."
            )
        if before == now or (before.mesh is None and now.mesh is None):
            return copied(earlier.carry)
        host = jax.tree.map(np.asarray, plain(earlier.carry))
        return copied(typed(now.place(host), earlier.carry))

    def evaluate_on(self, eval_fn: Any, data: Any, batch_size: int | None) -> None:
        """Says what to evaluate at the ends of epochs."""
        layout = Layout(self._layout.mesh, self._layout.batch)
        self._evaluator = Evaluator(eval_fn, data, batch_size, self._subject, layout)

    def keep_in(self, where: Any, every: int | None, keep: int | None, resume: bool | int) -> None:
        """Says where checkpoints go, and goes to one if that is asked for."""
        self._checkpoints = kept_runs.Checkpoints(where, every, keep)
        arrays = plain(self._carry)
        self.facts["the form of the state"] = kept_runs.form(arrays)
        if isinstance(self._feed, ArrayFeed):
            self.facts["the digest of train_data"] = processes.digest(self._feed._data)[:16]
        chosen = self._checkpoints.choose(resume, self._at.step)
        if chosen is None:
            return
        kept = self._checkpoints.read(chosen, arrays, self.facts)
        self._carry = copied(typed(kept.carry, self._carry))
        self._at, self._saved = Position(**kept.position), chosen
        self.history, self._seconds, self._iterator = kept.history, kept.seconds, kept.iterator

    def total_steps(self, epochs: int | None, steps: int | None) -> float:
        """How many steps there will be; infinite where nobody knows."""
        limits = [math.inf if steps is None else float(steps)]
        if epochs is not None and self._feed.steps_per_epoch is not None:
            limits.append(epochs * self._feed.steps_per_epoch)
        return min(limits)

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Trains until the end of a number of epochs or steps, whichever comes first."""
        if self._at.offset == 0 and self._was_stopped():
            return "stopped"
        self._since = time.perf_counter()
        compiled = steps_of(
            self._subject,
            self._loss_fn,
            self._layout,
            self._carry,
            has_aux=self._has_aux,
            rows=self._feed.rows,
        )
        is_begun, stop, error, code = False, False, None, 0
        while self._at.epoch <= epochs and self._at.step < steps:
            # 3: a failure, 2: a signal, 1: a callback wants to stop; in any process.
            code = processes.highest(3 if error else 2 if interrupt.requested else int(stop))
            if code:
                break
            try:
                if self._at.offset == 0:
                    self._start_epoch()
                if self._at.offset == 0 or not is_begun:
                    self._feed.begin(self._at.epoch, self._at.offset, self._iterator)
                    is_begun, self._iterator = True, None
                fed = self._feed.run(compiled, self._carry, self._limit(steps), interrupt)
                stop, error = self._after(fed, steps)
            except Exception as raised:  # what has been trained is saved first
                error = raised
        if code == 3 and error is None:
            error = RuntimeError("another process has failed: its message says why.")
        if error is not None:
            self._rescue(error)
            raise error
        names: tuple[Ended, ...] = ("finished", "stopped", "interrupted")
        return names[code]

    def _limit(self, steps: float) -> int:
        """How many steps may be taken until something happens."""
        at = self._at.step
        limits = [self._steps_per_call, steps - at, *(n - at % n for n in self._every)]
        most = int(min(limits))
        return most if self._checkpoints is None else self._checkpoints.until_next(at, most)

    def _start_epoch(self) -> None:
        at = self._at
        change = None if self._epoch_start is None else self._epoch_start(at.epoch)
        if change is None:
            return
        if not callable(change):
            raise TypeError(
                "epoch_start must return a function change(opt_state, params, full_gradient), such as "
                f"optperm.take_snapshot, or None, got {change!r}."
            )
        self.bar.show(at.step, f"epoch {at.epoch} full gradient")
        parts = self._subject.parts(self._carry)
        with self._layout.context():
            loss = self._subject.bound_loss(self._carry, self._loss_fn, has_aux=self._has_aux)
            batches = self._feed.all_batches(at.epoch)
            full_grad = full_gradient(loss, parts.params, batches, has_aux=True)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, parts.opt_state)
            compiled = jax.jit(change, out_shardings=shardings if self._layout.mesh else None)
            opt_state = compiled(parts.opt_state, parts.params, full_grad)
        checks.check_same_tree(
            "The optimizer state that epoch_start's function returned",
            opt_state,
            parts.opt_state,
            source="the one before",
        )
        # The new state may share memory with the params.
        self._carry = copied(
            self._subject.with_parts(self._carry, parts._replace(opt_state=opt_state))
        )

    def _after(self, fed: Fed, steps: float) -> tuple[bool, Exception | None]:
        """What happens after some steps: whether a callback wants to stop, and what has failed."""
        before = self._at
        self._carry = fed.carry
        self._at = at = before.after(fed.steps, is_over=fed.is_over and fed.error is None)
        self._tick()
        self.history.add_steps(fed.columns)
        if fed.error is not None:
            return False, fed.error
        stop = False
        try:
            if fed.columns:
                last = {name: float(column[-1]) for name, column in fed.columns.items()}
                self.bar.show(at.step, line(at.last_epoch, last))
                for interval, callbacks in self._every.items():
                    if at.step % interval == 0:
                        event = self._event(self.history.means(interval))
                        name = f"every[{interval}]"
                        stop |= wants_to_stop(callbacks, event, name=name)
            if fed.is_over or at.step >= steps:
                stop |= self._end_epoch()
            self._save()
        except Exception as error:  # so that what has been trained can be saved first
            return False, error
        return stop, None

    def _end_epoch(self) -> bool:
        at = self._at
        self._tick()
        # The end of an epoch may be found only when a batch more is asked for.
        if self.history.last.get("step") == at.step:
            return False
        epoch = at.last_epoch
        evaluated = self._evaluate()
        self.history.add_epoch(
            epoch=epoch, step=at.step, seconds=self._seconds, evaluated=evaluated
        )
        self._seconds = 0.0
        metrics = {k: v for k, v in self.history.last.items() if k not in ("epoch", "step")}
        self.bar.show(at.step, line(epoch, metrics))
        stop = wants_to_stop(self._epoch_end, self._event(metrics), name="on_epoch_end")
        self._since = time.perf_counter()
        return stop

    def _event(self, metrics: Mapping[str, float]) -> Event:
        at, history = self._at, self.history
        return Event(at.last_epoch, at.step, metrics, history, self._shown, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            return {}
        return self._evaluator.evaluate(self._trained(), self._at.last_epoch)

    def _was_stopped(self) -> bool:
        """Whether the run that is gone on with had come to its early end."""
        early = [callback for callback in self._epoch_end if isinstance(callback, EarlyStopping)]
        return bool(self.history.last) and any(each.is_due(self.history) for each in early)

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now

    def _trained(self) -> Any:
        """The carry, or what has been trained of those of all replicas."""
        if not self._layout.own:
            return self._carry
        with self._layout.context():
            return trained_of(self._carry, self._subject, self._layout)

    def _shown(self) -> Any:
        """A new train state, or a new model, of arrays of its own."""
        carry = copied(self._trained())
        return carry if self._subject.graphdef is None else self._subject.merge(carry)[0]

    def _save(self, *, force: bool = False) -> None:
        at = self._at
        if self._checkpoints is None or self._saved == at.step:
            return
        if not force and not self._checkpoints.is_due(at.step):
            return
        self._tick()
        self._checkpoints.write(
            at.step,
            kept_runs.Kept(
                plain(self._carry),
                dataclasses.asdict(at),
                self._seconds,
                self.history,
                self._feed.state(),
            ),
            self.facts,
        )
        self._saved = at.step

    def _rescue(self, error: Exception) -> None:
        """Saves what has been trained before an error is raised."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._carry)):
            return
        try:
            self.result("stopped")
        except kept_runs.CheckpointError as other:
            if isinstance(error, kept_runs.CheckpointError):
                error.result = other.result
            else:
                error.add_note(f"What had been trained could not be saved: {other}")

    def result(self, ended: Ended) -> FitResult:
        """What `fit` returns, once a model of `flax.nnx` and the last checkpoint have come so far.

        Raises:
          CheckpointError: If the last checkpoint cannot be written, with the result.
        """
        trained, is_linen = self._trained(), self._subject.graphdef is None
        if not is_linen:
            nnx.update((self._source, self._optimizer), copied(trained))
        feed = self._feed if isinstance(self._feed, StreamFeed) else None
        result = FitResult(
            state=trained if is_linen else None,
            model=None if is_linen else self._source,
            optimizer=None if is_linen else self._optimizer,
            history=self.history,
            ended=ended,
            epoch=self._at.epoch - 1,
            step=self._at.step,
            _standing=Standing(
                self._source,
                self._optimizer,
                self._layout,
                self._carry,
                self._at,
                self._seconds,
                feed,
            ),
        )
        if self._checkpoints is not None:
            try:
                self._save(force=True)
                self._checkpoints.close()
            except kept_runs.CheckpointError as error:
                error.result = result
                raise
        return result


def _changes(epoch_start: Any) -> Callable[[int], Change | None] | None:
    """`epoch_start` as a function of the epoch's number: one that takes three arguments is a change."""
    if epoch_start is None:
        return None
    if not callable(epoch_start):
        raise TypeError(f"epoch_start must be a function, got {epoch_start!r}.")
    signature = inspect.signature(epoch_start)
    try:
        signature.bind(1)
    except TypeError:
        return lambda epoch: epoch_start
    return epoch_start  # type: ignore[no-any-return]
