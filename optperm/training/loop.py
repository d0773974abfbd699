"""`fit`: trains a Flax model by any method."""

import dataclasses
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from flax import nnx

from optperm.contract import checks
from optperm.training import checkpoints, engine
from optperm.training.callbacks import as_callbacks
from optperm.training.data import check_iterable, is_arrays
from optperm.training.evaluations import Evaluator
from optperm.training.feeds import ArrayFeed
from optperm.training.history import History
from optperm.training.interrupt import Interrupt
from optperm.training.progress import check_progress, progress_bar
from optperm.training.run import Change, Run
from optperm.training.streams import StreamFeed
from optperm.training.subjects import Subject, subject_of
from optperm.training.train_state import TrainState


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
        `"interrupted"` by Ctrl-C.
      epoch: Whole epochs done, since the start of the first run.
      step: Steps done, likewise.
    """

    state: TrainState | None
    model: Any
    optimizer: Any
    history: History
    ended: engine.Ended
    epoch: int
    step: int
    _subject: Subject = dataclasses.field(repr=False)
    _carry: Any = dataclasses.field(repr=False)
    _position: engine.Position = dataclasses.field(repr=False)
    _seconds: float = dataclasses.field(repr=False)


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
    epoch_start: Callable[[int], Change | None] | None = None,
    on_batch_end: Any = None,
    on_epoch_end: Any = None,
    progress: bool | str = False,
    devices: int | None = None,
    own_state: bool | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    resume: bool | int = False,
    steps_per_call: int = 100,
) -> FitResult:
    r"""Trains a linen `TrainState`, or a model of `flax.nnx` with its optimizer.

    Every step is `optperm.evaluate` on one batch, the method's update with all extra arguments it may
    ask for, and `optperm.apply_updates`. Line searches and second gradients within a step see the batch
    statistics and the random key of that step; only the main evaluation's new batch statistics are kept.

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
        Or a function of the epoch's number, from 1, that gives such an iterable.
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
        number. The means are over examples. Every process evaluates all of it, on its first device.
      eval_batch_size: Examples at once, for arrays; `batch_size` by default.
      epoch_start: From the number of an epoch, a function `change(opt_state, params, full_gradient)`
        that gives the optimizer state to go on with, or None for nothing. The gradient is over all
        training examples. For SVRG: `lambda epoch: optperm.take_snapshot`.
      on_batch_end: A function of an `Event`, or a list of such, called after each step. True stops. With
        it every step is a call of its own.
      on_epoch_end: Likewise, after each epoch and its evaluation. See `EarlyStopping`.
      progress: Whether to show a bar: True or `"rich"`, or `"tqdm"`.
      devices: On how many devices of each process to train, each with its part of a batch, along the
        mapped axis `"replica"`. None for one, without such an axis; over several processes
        (`jax.distributed`), one of each. In-memory data are the same in all processes; an iterable
        brings in each its own part of the batches.
      own_state: Whether each device keeps params and a state of its own, and the method brings together
        what they learn, instead of the means of all gradients. None: it does for `optperm.agn` and
        `optperm.diloco`.
      checkpoint_dir: Where to keep checkpoints, named by their steps.
      checkpoint_every: After how many steps each to write one, and when training ends. None: then alone.
      checkpoint_keep: How many of the newest to keep; None for all.
      resume: Whether to go on from the newest checkpoint in `checkpoint_dir`, if there is one, or from
        that of a step. It ends bit for bit as if it had never stopped. What `loss_fn` computes and
        what the method's hyperparameters are is not compared.
      steps_per_call: The most steps by one call of a compiled program, for arrays. Ctrl-C takes effect
        after a call.

    Returns:
      A `FitResult`.

    Raises:
      TypeError: If an argument is of the wrong type, or a function returns something else than it must.
      ValueError: If an argument is out of range or does not fit another one, data hold no examples, or a
        checkpoint is of another run.
      CheckpointError: If a checkpoint cannot be written or read.
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
    _check_numbers(
        epochs=epochs,
        steps=steps,
        devices=devices,
        checkpoint_every=checkpoint_every,
        checkpoint_keep=checkpoint_keep,
        steps_per_call=steps_per_call,
        eval_batch_size=eval_batch_size,
    )
    if epochs is None and steps is None:
        raise ValueError("Pass epochs or steps: how long to train.")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {type(loss_fn).__name__}.")
    checks.check_flag("has_aux", has_aux)
    batch_end = as_callbacks("on_batch_end", on_batch_end)
    epoch_end = as_callbacks("on_epoch_end", on_epoch_end)
    bar_name = check_progress(progress)
    folder = _checkpoint_folder(checkpoint_dir, checkpoint_every, checkpoint_keep, resume)

    earlier = state_or_model if isinstance(state_or_model, FitResult) else None
    subject = subject_of(
        state_or_model if earlier is None else earlier._subject.source,
        loss_fn,
        optimizer=optimizer if earlier is None else earlier.optimizer,
        has_aux=has_aux,
        devices=devices,
        own_state=own_state,
    )
    replicas = subject.replicas
    if epoch_start is not None and subject.own:
        raise ValueError(
            "epoch_start changes a state that all devices share, but here each has its own "
            "(optperm.agn, optperm.diloco, or own_state=True)."
        )
    evaluator = Evaluator.of(subject.program, eval_fn, eval_data, eval_batch_size or batch_size)
    feed = _feed(subject, train_data, batch_size, seed, steps_per_call)
    with replicas.local(), Interrupt() as interrupt:
        length = {"epochs": epochs, "steps": steps, "steps_per_call": steps_per_call}
        if not replicas.agree({**feed.facts(), **length, "checkpoint_every": checkpoint_every}):
            raise ValueError(
                "The arguments of fit are not the same in all processes: pass everywhere the same data "
                "in memory (or iterables in all), batch_size, seed, epochs, steps, steps_per_call and "
                "checkpoint_every."
            )
        run = Run(subject, feed, evaluator, epoch_start, batch_end, epoch_end)
        carry = subject.initial() if earlier is None else subject.taken_over(earlier)
        at = engine.Position()
        if earlier is not None:
            at, run.history = earlier._position, earlier.history.copy()
            run.seconds = earlier._seconds
        if folder is not None:
            run.keep_in(folder, checkpoint_keep, carry)
            kept = run.find(resume, at, carry)
            if kept is not None:
                carry, at = run.restored(kept)
        total = _total_steps(feed, epochs, steps)
        with progress_bar(bar_name if replicas.process_id == 0 else None, total) as run.bar:
            try:
                subject.explain(lambda: feed.prepare(carry))
            except BaseException:
                feed.close()
                raise
            ended: engine.Ended = "stopped"
            if not (at.offset == 0 and run.was_stopped()):
                carry, at, ended = engine.train(
                    feed,
                    carry,
                    at,
                    run.hooks(),
                    replicas=replicas,
                    interrupt=interrupt,
                    epochs=math.inf if epochs is None else epochs,
                    steps=math.inf if steps is None else steps,
                    steps_a_call=1 if batch_end else steps_per_call,
                    save_every=(checkpoint_every or 2**62) if folder is not None else 0,
                )
        trained = subject.trained(carry)
        subject.bring(trained)
    return FitResult(
        state=subject.state(trained),
        model=subject.model,
        optimizer=subject.optimizer,
        history=run.history,
        ended=ended,
        epoch=at.epoch - 1,
        step=at.step,
        _subject=subject,
        _carry=carry,
        _position=at,
        _seconds=run.seconds,
    )


def _feed(
    subject: Subject, train_data: Any, batch_size: int | None, seed: int, steps_per_call: int
) -> ArrayFeed | StreamFeed:
    program, replicas, own = subject.program, subject.replicas, subject.own
    if is_arrays(train_data):
        if batch_size is None:
            raise ValueError("Pass batch_size: train_data are arrays, and a step takes a part.")
        return ArrayFeed(
            train_data,
            batch_size=batch_size,
            seed=seed,
            program=program,
            replicas=replicas,
            own=own,
            steps_a_call=steps_per_call,
        )
    check_iterable("train_data", train_data)
    if batch_size is not None:
        raise ValueError(
            "batch_size is for arrays: train_data gives batches, and their size is theirs."
        )
    return StreamFeed(train_data, program=program, replicas=replicas, own=own)


def _check_numbers(**numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None:
            checks.check_count(name, number)


def _checkpoint_folder(
    folder: Any, every: int | None, keep: int | None, resume: bool | int
) -> pathlib.Path | None:
    if resume is not True and resume is not False:
        checks.check_count("resume", resume, minimum=0)
    if folder is None:
        given = {"checkpoint_every": every, "checkpoint_keep": keep, "resume": resume or None}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} goes with checkpoint_dir: pass that as well.")
        return None
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(f"checkpoint_dir must be a path, got {type(folder).__name__}.")
    checkpoints.require()
    return pathlib.Path(folder)


def _total_steps(feed: ArrayFeed | StreamFeed, epochs: int | None, steps: int | None) -> float:
    limits = [math.inf if steps is None else float(steps)]
    if epochs is not None and isinstance(feed, ArrayFeed):
        limits.append(epochs * feed.steps_per_epoch)
    return min(limits)
