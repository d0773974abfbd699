"""`fit`: trains a Flax model by any method."""

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from flax import nnx

from optperm.contract import checks
from optperm.training import data as datas
from optperm.training import processes
from optperm.training.callbacks import EarlyStopping, Event, as_callbacks, wants_to_stop
from optperm.training.checkpoints import CheckpointError, Checkpoints, form
from optperm.training.evaluations import Evaluator
from optperm.training.feeds import ArrayFeed, Fed, StreamFeed
from optperm.training.history import History
from optperm.training.interrupt import Interrupt
from optperm.training.layout import Layout, layout_of
from optperm.training.progress import Show, check_progress, line, progress_bar
from optperm.training.steps import Model, Steps, copied, plain, steps_of, trained, typed
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient

# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]


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
class Standing:
    """Where a run stands: what another one needs to go on from it.

    Attributes:
      source: What was passed to be trained.
      optimizer: Its optimizer, of a model of `flax.nnx`.
      layout: Where the carry lies.
      carry: The train state, or those of all replicas.
      at: How far it has come.
      seconds: Wall time since the last row of an epoch.
      feed: The batches.
    """

    source: Any
    optimizer: Any
    layout: Layout
    carry: TrainState
    at: Position
    seconds: float
    feed: ArrayFeed | StreamFeed | None


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
    _standing: Standing = dataclasses.field(repr=False)


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
    counts |= {"checkpoint_every": checkpoint_every, "steps_per_call": steps_per_call}
    for name, count in {**counts, "checkpoint_keep": checkpoint_keep}.items():
        if count is not None:
            checks.check_count(name, count)
    checks.check_seed("seed", seed)
    checks.check_flag("has_aux", has_aux)
    if epochs is None and steps is None:
        raise ValueError("Pass epochs or steps: how long to train.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}.")
    if resume is not True and resume is not False:
        checks.check_count("resume", resume, minimum=0)
    if checkpoints is None and (checkpoint_every or checkpoint_keep or resume is not False):
        raise ValueError(
            "resume, checkpoint_every and checkpoint_keep go with checkpoints: pass those."
        )
    bar_name = check_progress(progress)
    run = _Run(state_or_model, optimizer, mesh=mesh, devices=devices, replicas=replicas)
    run.train_on(
        loss_fn, train_data, batch_size, int(seed), int(steps_per_call), has_aux=bool(has_aux)
    )
    run.evaluate_on(eval_fn, eval_data, eval_batch_size or batch_size)
    run.call(every, epoch_start, on_epoch_end)
    run.begin(counts)
    if checkpoints is not None:
        run.keep_in(Checkpoints(checkpoints, checkpoint_every, checkpoint_keep), resume)
    most = math.inf if epochs is None else epochs, math.inf if steps is None else steps
    total = min(most[0] * (run.feed.steps_per_epoch or math.inf), most[1])
    bar = progress_bar(bar_name if jax.process_index() == 0 else None, total)
    with Interrupt() as interrupt, bar as run.show:
        ended = run.train(*most, interrupt)
    return run.result(ended)


class _Run:
    """One call of `fit`: what is trained, where, by which batches, and what happens meanwhile."""

    def __init__(self, source: Any, optimizer: Any, **places: Any) -> None:
        self._earlier = source._standing if isinstance(source, FitResult) else None
        self._history = source.history.copy() if isinstance(source, FitResult) else History()
        if self._earlier is not None:
            source, optimizer = self._earlier.source, self._earlier.optimizer
        self._source, self._optimizer = source, optimizer
        self._model, self._initial = Model.of(source, optimizer)
        if self._earlier is not None and not any(places.values()):
            self._layout = self._earlier.layout
        else:
            self._layout = layout_of(self._initial.tx, self._initial, **places)
        self._at, self._seconds, self._saved = Position(), 0.0, -1
        self._iterator: str | None = None
        self._checkpoints: Checkpoints | None = None
        self.show: Show = lambda step, says: None

    def train_on(
        self,
        loss_fn: Callable[..., Any],
        data: Any,
        batch_size: int | None,
        seed: int,
        steps_per_call: int,
        *,
        has_aux: bool,
    ) -> None:
        """Says by what to train."""
        self._loss_fn, self._has_aux, self._steps_per_call = loss_fn, has_aux, steps_per_call
        self._facts: dict[str, Any] = {
            "the kind of model": "linen" if self._model.graphdef is None else "nnx",
            "seed": seed,
        }
        self.feed: ArrayFeed | StreamFeed
        if not datas.is_arrays(data):
            earlier = self._earlier.feed if self._earlier else None
            earlier = earlier if isinstance(earlier, StreamFeed) else None
            self.feed = StreamFeed(data, layout=self._layout, earlier=earlier)
            self._facts["train_data"] = "an iterable of batches"
            if batch_size is not None:
                raise ValueError(
                    "batch_size is for arrays: train_data gives batches, and their size is theirs."
                )
            return
        if batch_size is None:
            raise ValueError("Pass batch_size: train_data are arrays, and a step takes a part.")
        options = {"seed": seed, "layout": self._layout, "steps_per_call": steps_per_call}
        self.feed = ArrayFeed(data, batch_size=batch_size, **options)
        forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", data)
        self._facts |= {"batch_size": int(batch_size), "train_data": str(forms)}

    def evaluate_on(self, eval_fn: Any, data: Any, batch_size: int | None) -> None:
        """Says what to evaluate."""
        self._evaluator = None
        if (eval_fn is None) != (data is None):
            missing = "eval_fn" if eval_fn is None else "eval_data"
            raise ValueError(f"eval_fn and eval_data go together: pass {missing} as well.")
        if eval_fn is not None:
            layout = Layout(self._layout.mesh, self._layout.batch)
            self._evaluator = Evaluator(eval_fn, data, batch_size, self._model, layout)

    def call(self, every: Any, epoch_start: Any, epoch_end: Any) -> None:
        """Says what to call when."""
        if not isinstance(every, Mapping | None):
            raise TypeError(
                "every must be a dict of functions by the steps between their calls, such as {100: log}, "
                f"got {type(every).__name__}."
            )
        for steps in every or {}:
            checks.check_count("a key of every", steps)
        self._every = {int(n): as_callbacks(f"every[{n}]", f) for n, f in (every or {}).items()}
        self._epoch_end = as_callbacks("on_epoch_end", epoch_end)
        self._epoch_start = _by_epoch(epoch_start)
        if epoch_start is not None and self._layout.own:
            raise ValueError(
                "epoch_start changes a state that all replicas share, but by this method each has its "
                "own."
            )

    def begin(self, counts: Mapping[str, Any]) -> None:
        """Places what is trained, where all processes agree on it."""
        if jax.process_count() > 1:
            params = processes.digest(plain(self._initial.params))
            digests = {"params": params, "data in memory": self._digest()}
            processes.check_same({**self._facts, **counts, **digests})
        earlier = self._earlier
        self._carry = self._placed(self._initial) if earlier is None else self._taken_over(earlier)
        if earlier is not None:
            self._at, self._seconds = earlier.at, earlier.seconds

    def _digest(self) -> str | None:
        return processes.digest(self.feed.data) if isinstance(self.feed, ArrayFeed) else None

    def _placed(self, state: TrainState) -> TrainState:
        layout = self._layout
        placed = typed(layout.place(plain(state)), state)
        with layout.context():
            if placed.opt_state is None and not layout.mapped:
                placed = placed.replace(opt_state=placed.tx.init(placed.params))
            if layout.own:
                placed = layout.stack(placed)
            if placed.opt_state is not None:
                return copied(placed)

            def init(state: TrainState, _: Any, __: Any) -> tuple[TrainState, Any]:
                return state.replace(opt_state=state.tx.init(state.params)), ()

            return jax.jit(layout.spread(init, 0))(placed, (), ())[0]

    def _taken_over(self, earlier: Standing) -> TrainState:
        before, now = earlier.layout, self._layout
        if before == now:
            return copied(earlier.carry)
        if before.own or now.own:
            raise ValueError(
                f"The earlier fit trained {before.parts} replicas, each with a state of its own, and this "
                f"one cannot go on with {now.parts}: pass the same, or begin anew from its state."
            )
        host = jax.tree.map(np.asarray, plain(earlier.carry))
        return copied(typed(now.place(host), earlier.carry))

    def keep_in(self, checkpoints: Checkpoints, resume: bool | int) -> None:
        """Says where checkpoints go, and goes to one if that is asked for."""
        self._checkpoints, arrays = checkpoints, plain(self._carry)
        own = self._layout.parts if self._layout.own else None
        self._facts |= {"the form of the state": form(arrays), "replicas with a state each": own}
        self._facts["the digest of train_data"] = self._digest()
        if (chosen := checkpoints.choose(resume, self._at.step)) is None:
            return
        arrays, rows, run = checkpoints.read(chosen, arrays, self._facts)
        self._carry = copied(typed(arrays, self._carry))
        self._history = History.from_arrays(
            dict(zip(run["names"], rows, strict=True)), run["epochs"]
        )
        self._at, self._saved = Position(**run["position"]), chosen
        self._seconds, self._iterator = run["seconds"], run["iterator"]

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Trains until the end of a number of epochs or steps, whichever comes first."""
        stopping = [each for each in self._epoch_end if isinstance(each, EarlyStopping)]
        if (
            not self._at.offset
            and self._history.last
            and any(each.is_due(self._history) for each in stopping)
        ):
            return "stopped"
        self._since = time.perf_counter()
        is_begun, stop, error, code = False, False, None, 0
        compiled = self._steps()
        while self._at.epoch <= epochs and self._at.step < steps:
            # In any process 3 is a failure, 2 a signal, and 1 a callback that wants to stop.
            code = processes.highest(3 if error else 2 if interrupt.requested else int(stop))
            if code:
                break
            try:
                if not self._at.offset:
                    self._start_epoch()
                if not self._at.offset or not is_begun:
                    self.feed.begin(self._at.epoch, self._at.offset, self._iterator)
                    is_begun, self._iterator = True, None
                fed = self.feed.run(compiled, self._carry, self._limit(steps), interrupt)
                stop, error = self._after(fed, steps)
            except Exception as raised:  # what has been trained is saved first
                error = raised
        if code == 3 and error is None:
            error = RuntimeError("another process has failed: see what it says.")
        if error is not None:
            self._rescue(error)
            if "is not bound here" in str(error):
                error.add_note("fit maps over an axis with devices, mesh or replicas.")
            raise error
        names: tuple[Ended, ...] = ("finished", "stopped", "interrupted")
        return names[code]

    def _steps(self) -> Steps:
        model, carry, options = self._model, self._carry, {"has_aux": self._has_aux}
        return steps_of(model, self._loss_fn, self._layout, carry, rows=self.feed.rows, **options)

    def _limit(self, steps: float) -> int:
        """How many steps may be taken until something happens."""
        at = self._at.step
        most = int(
            min(self._steps_per_call, steps - at, *(n - at % n for n in (1 << 31, *self._every)))
        )
        return most if self._checkpoints is None else self._checkpoints.until_next(at, most)

    def _start_epoch(self) -> None:
        at, carry = self._at, self._carry
        if self._epoch_start is None or (change := self._epoch_start(at.epoch)) is None:
            return
        if not callable(change):
            raise TypeError(
                "epoch_start must return a function change(opt_state, params, full_gradient), such as "
                f"optperm.take_snapshot, or None, got {change!r}."
            )
        self.show(at.step, f"epoch {at.epoch} full gradient")
        with self._layout.context():
            loss = self._model.loss(self._loss_fn, has_aux=self._has_aux)
            bound = jax.tree_util.Partial(loss, carry.model_state, carry.step_rng())
            grad = full_gradient(bound, carry.params, self.feed.all_batches(at.epoch), has_aux=True)
            there = None
            if self._layout.mesh is not None:
                there = jax.tree.map(lambda leaf: leaf.sharding, carry.opt_state)
            changed = jax.jit(change, out_shardings=there)(carry.opt_state, carry.params, grad)
        checks.check_same_tree(
            "The optimizer state that epoch_start's function returned",
            changed,
            carry.opt_state,
            source="the one before",
        )
        # It may share memory with the params.
        self._carry = copied(carry.replace(opt_state=changed))

    def _after(self, fed: Fed, steps: float) -> tuple[bool, Exception | None]:
        """What happens after some steps: whether a callback wants to stop, and what has failed."""
        self._carry, is_over = fed.carry, fed.is_over and fed.error is None
        self._at = at = self._at.after(fed.steps, is_over=is_over)
        self._tick()
        self._history.add_steps(fed.columns)
        if fed.error is not None:
            return False, fed.error
        stop = False
        if fed.columns:
            last = {name: float(column[-1]) for name, column in fed.columns.items()}
            self.show(at.step, line(at.last_epoch, last))
            for n, callbacks in self._every.items():
                if at.step % n == 0:
                    event = self._event(self._history.means(n))
                    stop |= wants_to_stop(f"every[{n}]", callbacks, event)
        if is_over or at.step >= steps:
            stop |= self._end_epoch()
        if self._checkpoints is not None and self._checkpoints.is_due(at.step):
            self._save()
        return stop, None

    def _end_epoch(self) -> bool:
        at = self._at
        # That an epoch was over may be found only when a batch more is asked for.
        if self._history.last.get("step") == at.step:
            return False
        evaluated = self._evaluate() if self._evaluator is not None else {}
        row = {"epoch": at.last_epoch, "step": at.step, "seconds": self._seconds}
        self._history.add_epoch(**row, evaluated=evaluated)
        self._seconds = 0.0
        metrics = {k: v for k, v in self._history.last.items() if k not in ("epoch", "step")}
        self.show(at.step, line(at.last_epoch, metrics))
        stop = wants_to_stop("on_epoch_end", self._epoch_end, self._event(metrics))
        self._since = time.perf_counter()
        return stop

    def _event(self, metrics: Mapping[str, float]) -> Event:
        at, history = self._at, self._history
        return Event(at.last_epoch, at.step, metrics, history, self._shown, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            raise ValueError("There is nothing to evaluate: pass eval_fn and eval_data to fit.")
        return self._evaluator.evaluate(self._trained(), self._at.last_epoch)

    def _tick(self) -> None:
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now

    def _trained(self) -> TrainState:
        """The carry, or what has been trained of those of all replicas."""
        with self._layout.context():
            return trained(self._carry, self._layout) if self._layout.own else self._carry

    def _shown(self) -> Any:
        """A new train state, or a new model, of arrays of its own."""
        return self._model.shown(self._layout.bring_home(copied(self._trained())))

    def _save(self) -> None:
        at, steps, history = self._at, self._history.steps, self._history
        if self._checkpoints is None or self._saved == at.step:
            return
        self._tick()
        run = {
            "facts": self._facts,
            "position": dataclasses.asdict(at),
            "seconds": self._seconds,
            "names": list(steps),
            "epochs": history.epoch_rows,
            "iterator": self.feed.state(),
        }
        rows = np.array(list(steps.values()), np.float32).reshape(len(steps), -1)
        state = plain(self._carry)
        self._checkpoints.write(at.step, state, rows, run, history.last or None)
        self._saved = at.step

    def _rescue(self, error: Exception) -> None:
        """Saves what has been trained before an error is raised."""
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self._carry)):
            return
        try:
            self.result("stopped")
        except CheckpointError as other:
            if isinstance(error, CheckpointError):
                error.result = other.result
            else:
                error.add_note(f"What had been trained could not be saved: {other}")

    def result(self, ended: Ended) -> FitResult:
        """What `fit` returns, once a model of `flax.nnx` and the last checkpoint have come so far."""
        state, is_linen = self._layout.bring_home(self._trained()), self._model.graphdef is None
        if not is_linen:
            self._model.bring(self._source, self._optimizer, copied(state))
        source = self._source, self._optimizer, self._layout, self._carry
        # Arrays of data need not outlive the call.
        feed = self.feed if isinstance(self.feed, StreamFeed) else None
        result = FitResult(
            state=state if is_linen else None,
            model=None if is_linen else self._source,
            optimizer=self._optimizer,
            history=self._history,
            ended=ended,
            epoch=self._at.epoch - 1,
            step=self._at.step,
            _standing=Standing(*source, self._at, self._seconds, feed),
        )
        if self._checkpoints is not None:
            try:
                self._save()
                self._checkpoints.close()
            except CheckpointError as error:
                error.result = result
                raise
        return result


def _by_epoch(epoch_start: Any) -> Callable[[int], Any] | None:
    """`epoch_start` as a function of the epoch's number, where it is itself the change of each epoch."""
    if epoch_start is None or not callable(epoch_start):
        if epoch_start is not None:
            raise TypeError(f"epoch_start must be a function, got {epoch_start!r}.")
        return None
    try:
        inspect.signature(epoch_start).bind(1)
    except TypeError:
        return lambda epoch: epoch_start
    return epoch_start  # type: ignore[no-any-return]
