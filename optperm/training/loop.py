"""`fit`: trains a Flax model by any method."""

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

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
from optperm.training.steps import Model, copied, plain, steps_of, trained, typed
from optperm.training.train_state import TrainState
from optperm.variance.full_gradient import full_gradient

# Why training ended.
Ended = Literal["finished", "stopped", "interrupted"]


class Position(NamedTuple):
    """How far training has come: steps in all, the epoch of the next one, and steps within that."""

    step: int = 0
    epoch: int = 1
    offset: int = 0

    def after(self, steps: int, *, is_over: bool) -> "Position":
        """The position some steps later, in the same epoch or at the start of the next."""
        step = self.step + steps
        return (
            Position(step, self.epoch + 1)
            if is_over
            else Position(step, self.epoch, self.offset + steps)
        )


class Standing(NamedTuple):
    """What another run needs to go on from one."""

    source: Any
    optimizer: Any
    layout: Layout
    carry: TrainState
    at: Position
    seconds: float
    stream: StreamFeed | None


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
    mesh: Mesh | NamedSharding | None = None,
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
    statistics and the random key of that step; only the main evaluation's new statistics are kept.

    On a mesh one program runs on all devices: batches are sharded, the state lies as it was passed, and
    the result is that of one device; BatchNorm and dropout see the whole batch. Within steps the axes of
    an explicit mesh are automatic too. A method that was built with the name of a mapped axis runs by
    `jax.shard_map` over that axis instead, each device with its part of a batch; `optperm.agn` and
    `optperm.diloco` do, each replica with params of its own.

    Args:
      state_or_model: A `TrainState`, which is left alone; or a model of `flax.nnx`, trained in place; or
        what an earlier `fit` returned, to go on from exactly there, on the same devices by default.
      loss_fn: For a `TrainState` `loss_fn(params, batch)`, as `optperm.evaluate` takes it: the scalar
        mean loss. It may take `model_state` by name as well, and then returns `(loss, new_model_state)`,
        and `rng`, a key of each step, drawn from the state's. For a model of `flax.nnx`
        `loss_fn(model, batch)`, which may change the model's state.
      train_data: A tree of arrays that agree in their leading axis (a dict, a tuple or an array),
        shuffled anew each epoch by `seed` alone (`optperm.training.shuffled`); a last part that fills no
        batch is left out. Or an iterable of batches (a list, a data loader), gone through in each epoch.
        Or a function of the epoch's number, from 1, that gives such an iterable. No batch is asked for
        before the step that takes it.
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
      devices: Short for a mesh of so many devices of each process, along the axis `"replica"`; of
        several processes (`jax.distributed`) one each by default. In-memory data are the same in all
        processes; an iterable brings in each its own part of a batch, all of one size.
      replicas: How many replicas of `optperm.agn`, `optperm.diloco` or another method with
        `axis_name="replica"` to simulate on one device.
      every: Functions of an `Event`, or lists of such, by the number of steps between their calls:
        `{100: log, 1000: evaluate}`. True stops. With several processes all of them call them.
      epoch_start: A function `change(opt_state, params, full_gradient)` that gives the optimizer state
        with which each epoch begins, such as `optperm.take_snapshot` for SVRG; the gradient is over all
        training examples. Or a function of the epoch's number that gives such a function, or None.
      on_epoch_end: A function of an `Event`, or a list of such, called after each epoch and its
        evaluation. True stops. See `EarlyStopping` and `metrics_writer`.
      checkpoints: Where to keep checkpoints, named by their steps: a folder (of any file system that
        `etils.epath` knows, `gs://` too), or an `orbax.checkpoint.CheckpointManager`.
      checkpoint_every: After how many steps each to write one into a folder. One is written in any case
        when training ends, by an error of a callback, of the data or of `loss_fn` too.
      checkpoint_keep: How many of the newest to keep in a folder; None for all.
      resume: Whether to go on from the newest checkpoint, if there is one, or from that of a step; what
        was kept after it is overwritten. On the same devices it ends bit for bit as if it had never
        stopped. What `loss_fn` computes and the method's hyperparameters are not compared.
      progress: Whether to show a bar: True or `"rich"`, or `"tqdm"`.
      steps_per_call: The most steps by one call of a compiled program, for arrays. Ctrl-C and SIGTERM
        take effect after a call; a second Ctrl-C at once.

    Returns:
      A `FitResult`.

    Raises:
      TypeError: If an argument is of the wrong type, or a function returns something else than it must.
      ValueError: If an argument is out of range or does not fit another one, data hold no examples, a
        checkpoint is of another run, or several processes disagree on params, data or numbers.
      CheckpointError: If a checkpoint cannot be read, or written, which is tried before the first step.
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
    counts = {"epochs": epochs, "steps": steps, "steps_per_call": steps_per_call}
    counts |= {"eval_batch_size": eval_batch_size, "checkpoint_every": checkpoint_every}
    for name, count in {**counts, "checkpoint_keep": checkpoint_keep}.items():
        if count is not None:
            checks.check_count(name, count)
    checks.check_seed("seed", seed)
    checks.check_flag("has_aux", has_aux)
    if epochs is None and steps is None:
        raise ValueError("Pass epochs or steps: how long to train.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}.")
    if not isinstance(resume, bool):
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
    run.place(counts)
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

    feed: ArrayFeed | StreamFeed
    show: Show

    def __init__(self, source: Any, optimizer: Any, **places: Any) -> None:
        self._earlier: Standing | None = None
        self._history, self._at, self._seconds, self._saved = History(), Position(), 0.0, -1
        if isinstance(source, FitResult):
            self._earlier, old = source._standing, source.history
            self._history = History.from_arrays(old.steps, old.epoch_rows)
            source, optimizer, layout, _, self._at, self._seconds, _ = source._standing
        self._source, self._optimizer = source, optimizer
        self._model, self._initial = Model.of(source, optimizer)
        if self._earlier is None or any(places.values()):
            layout = layout_of(self._initial.tx, self._initial, **places)
        self._layout, self._iterator = layout, None
        self._checkpoints: Checkpoints | None = None

    def train_on(
        self, loss_fn: Any, data: Any, batch_size: Any, seed: int, steps: int, *, has_aux: bool
    ) -> None:
        """Says by what to train."""
        self._loss_fn, self._has_aux, self._steps_per_call = loss_fn, has_aux, steps
        kind = "linen" if self._model.graphdef is None else "nnx"
        self._facts: dict[str, Any] = {"the kind of model": kind, "seed": seed}
        if datas.is_arrays(data):
            if batch_size is None:
                raise ValueError("Pass batch_size: train_data are arrays, and a step takes a part.")
            self.feed = ArrayFeed(data, batch_size, seed, self._layout, steps)
            forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", data)
            self._facts |= {"batch_size": int(batch_size), "train_data": str(forms)}
            return
        self.feed = StreamFeed(data, self._layout, self._earlier and self._earlier.stream)
        self._facts["train_data"] = "an iterable of batches"
        if batch_size is not None:
            raise ValueError(
                "batch_size is for arrays: train_data gives batches, of sizes of their own."
            )

    def evaluate_on(self, eval_fn: Any, data: Any, batch_size: int | None) -> None:
        """Says what to evaluate."""
        if (eval_fn is None) != (data is None):
            missing = "eval_fn" if eval_fn is None else "eval_data"
            raise ValueError(f"eval_fn and eval_data go together: pass {missing} as well.")
        where = Layout(self._layout.mesh, self._layout.batch)
        options = (eval_fn, data, batch_size, self._model, where)
        self._evaluator = None if eval_fn is None else Evaluator(*options)

    def call(self, every: Any, epoch_start: Any, epoch_end: Any) -> None:
        """Says what to call when."""
        if not isinstance(every, Mapping | None):
            raise TypeError(
                f"every must be a dict such as {{100: log}}, got {type(every).__name__}."
            )
        for steps in every or {}:
            checks.check_count("a key of every", steps)
        self._every = {int(n): as_callbacks(f"every[{n}]", f) for n, f in (every or {}).items()}
        self._epoch_end = as_callbacks("on_epoch_end", epoch_end)
        if epoch_start is not None and not callable(epoch_start):
            raise TypeError(f"epoch_start must be a function, got {epoch_start!r}.")
        if epoch_start is not None and self._layout.own:
            raise ValueError(
                "epoch_start changes a shared state, but here each replica has its own."
            )
        self._epoch_start = epoch_start

    def place(self, counts: Mapping[str, Any]) -> None:
        """Places what is trained, once all processes agree on it."""
        if jax.process_count() > 1:
            params = processes.digest(plain(self._initial.params))
            digests = {"params": params, "data in memory": self.feed.digest()}
            processes.check_same({**self._facts, **counts, **digests})
        now, earlier = self._layout, self._earlier
        if earlier is None:
            self._carry = self._placed(self._initial)
        elif earlier.layout == now:
            self._carry = copied(earlier.carry)
        elif earlier.layout.own or now.own:
            raise ValueError(
                f"The earlier fit trained {earlier.layout.parts} replicas, each with a state of its own,"
                f" and cannot go on with {now.parts}: pass the same, or begin anew from its state."
            )
        else:
            host = jax.tree.map(np.asarray, plain(earlier.carry))
            self._carry = copied(typed(now.place(host), earlier.carry))

    def _placed(self, state: TrainState) -> TrainState:
        layout = self._layout
        placed = typed(layout.place(plain(state)), state)
        with layout.context():
            if placed.opt_state is None and not layout.mapped:
                placed = placed.replace(opt_state=placed.tx.init(placed.params))
            placed = layout.stack(placed) if layout.own else placed
            if placed.opt_state is not None:
                return copied(placed)

            def init(state: TrainState, _: Any, __: Any) -> tuple[TrainState, Any]:
                return state.replace(opt_state=state.tx.init(state.params)), ()

            return jax.jit(layout.spread(init, 0))(placed, (), ())[0]

    def keep_in(self, checkpoints: Checkpoints, resume: bool | int) -> None:
        """Says where checkpoints go, and goes to one if that is asked for."""
        self._checkpoints, arrays = checkpoints, plain(self._carry)
        own = self._layout.parts if self._layout.own else None
        self._facts |= {"the form of the state": form(arrays), "replicas with a state each": own}
        self._facts["the digest of train_data"] = self.feed.digest()
        if (chosen := checkpoints.choose(resume, self._at.step)) is None:
            return
        arrays, rows, run = checkpoints.read(chosen, arrays, self._facts)
        self._carry, self._saved = copied(typed(arrays, self._carry)), chosen
        self._history = History.from_arrays(
            dict(zip(run["names"], rows, strict=True)), run["epochs"]
        )
        self._at, self._seconds = Position(*run["position"]), run["seconds"]
        self._iterator = run["iterator"]

    def train(self, epochs: float, steps: float, interrupt: Interrupt) -> Ended:
        """Trains until the end of a number of epochs or steps, whichever comes first."""
        early = [callback for callback in self._epoch_end if isinstance(callback, EarlyStopping)]
        if (
            self._history.last
            and not self._at.offset
            and any(e.is_due(self._history) for e in early)
        ):
            return "stopped"
        self._since, rows = time.perf_counter(), self.feed.rows
        compiled = steps_of(
            self._model, self._loss_fn, self._layout, self._carry, has_aux=self._has_aux, rows=rows
        )
        is_begun, stop, error, code = False, False, None, 0
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

    def _limit(self, steps: float) -> int:
        """How many steps may be taken until something happens."""
        at = self._at.step
        most = min(self._steps_per_call, *(n - at % n for n in (2**31, *self._every)))
        most = int(min(most, steps - at))
        return most if self._checkpoints is None else self._checkpoints.until_next(at, most)

    def _start_epoch(self) -> None:
        change, carry = self._epoch_start, self._carry
        if change is not None:
            try:
                inspect.signature(change).bind(1)
            except TypeError:
                pass  # it takes more than the number of an epoch: it is the change itself
            else:
                change = change(self._at.epoch)
        if change is None:
            return
        if not callable(change):
            raise TypeError(
                "epoch_start must return a function change(opt_state, params, full_gradient), such as "
                f"optperm.take_snapshot, or None, got {change!r}."
            )
        self.show(self._at.step, f"epoch {self._at.epoch} full gradient")
        with self._layout.context():
            loss = self._model.loss(self._loss_fn, has_aux=self._has_aux)
            bound = jax.tree_util.Partial(loss, carry.model_state, carry.step_rng())
            batches = self.feed.all_batches(self._at.epoch)
            grad = full_gradient(bound, carry.params, batches, has_aux=True)
            there = jax.tree.map(lambda leaf: leaf.sharding, carry.opt_state)
            change = jax.jit(change, out_shardings=there if self._layout.mesh else None)
            changed = change(carry.opt_state, carry.params, grad)
        says = "The optimizer state that epoch_start's function returned"
        checks.check_same_tree(says, changed, carry.opt_state, source="the one before")
        self._carry = copied(
            carry.replace(opt_state=changed)
        )  # it may share memory with the params

    def _after(self, fed: Fed, steps: float) -> tuple[bool, Exception | None]:
        """What happens after some steps: whether a callback wants to stop, and what has failed."""
        self._carry, is_over, stop = fed.carry, fed.is_over and fed.error is None, False
        self._at = at = self._at.after(fed.steps, is_over=is_over)
        self._tick()
        self._history.add_steps(fed.columns)
        if fed.error is not None:
            return False, fed.error
        if fed.columns:
            self.show(at.step, line(self._epoch, self._history.means(1)))
            for n, callbacks in self._every.items():
                if at.step % n == 0:
                    event = self._event(self._history.means(n))
                    stop |= wants_to_stop(f"every[{n}]", callbacks, event)
        if is_over or at.step >= steps:
            stop |= self._end_epoch()
        if self._checkpoints is not None and self._checkpoints.is_due(at.step):
            self._save(self._checkpoints)
        return stop, None

    def _end_epoch(self) -> bool:
        # That an epoch was over may be found only when a batch more is asked for.
        if self._history.last.get("step") == self._at.step:
            return False
        evaluated = {} if self._evaluator is None else self._evaluate()
        self._history.add_epoch(
            epoch=self._epoch, step=self._at.step, seconds=self._seconds, evaluated=evaluated
        )
        metrics = {k: v for k, v in self._history.last.items() if k not in ("epoch", "step")}
        self.show(self._at.step, line(self._epoch, metrics))
        stop = wants_to_stop("on_epoch_end", self._epoch_end, self._event(metrics))
        self._seconds, self._since = 0.0, time.perf_counter()
        return stop

    @property
    def _epoch(self) -> int:
        """The epoch of the last step."""
        return self._at.epoch if self._at.offset else self._at.epoch - 1

    def _event(self, metrics: Mapping[str, float]) -> Event:
        history = self._history
        return Event(self._epoch, self._at.step, metrics, history, self._shown, self._evaluate)

    def _evaluate(self) -> dict[str, float]:
        if self._evaluator is None:
            raise ValueError("There is nothing to evaluate: pass eval_fn and eval_data to fit.")
        return self._evaluator.evaluate(self._trained(), self._epoch)

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

    def _save(self, checkpoints: Checkpoints) -> None:
        if self._saved == self._at.step:
            return
        self._tick()
        run = {"facts": self._facts, "position": list(self._at), "seconds": self._seconds}
        # Copies: Orbax writes them while training goes on.
        run |= {"names": list(self._history.steps), "epochs": list(self._history.epoch_rows)}
        run["iterator"] = self.feed.state()
        rows = np.array(list(self._history.steps.values()), np.float32)
        checkpoints.write(self._at.step, plain(self._carry), rows, run, self._history.last)
        self._saved = self._at.step

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
        stream = self.feed if isinstance(self.feed, StreamFeed) else None
        what = self._source, self._optimizer, self._layout, self._carry
        result = FitResult(
            state if is_linen else None,
            None if is_linen else self._source,
            self._optimizer,
            self._history,
            ended,
            self._at.epoch - 1,
            self._at.step,
            Standing(*what, self._at, self._seconds, stream),
        )
        if self._checkpoints is not None:
            try:
                self._save(self._checkpoints)
                self._checkpoints.close()
            except CheckpointError as error:
                error.result = result
                raise
        return result
