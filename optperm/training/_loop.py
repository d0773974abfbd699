"""`fit`: train a Flax model with any method."""

import dataclasses
import math
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from optperm.core import checks
from optperm.training import _processes as processes
from optperm.training import _steps as programs
from optperm.training._checkpoints import Checkpoints, Folder
from optperm.training._data import StreamFeed, make_feed
from optperm.training._layout import Layout, choose_layout
from optperm.training._run import FitResult, Run, Setup
from optperm.training._schedule import Schedule
from optperm.training._terminal import Interrupt, progress_bar
from optperm.training._validation import Evaluator, Validation


def fit(
    state: Any,
    loss_fn: Callable[..., Any],
    data: Any,
    *,
    optimizer: nnx.Optimizer[Any] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    key: int | jax.Array = 0,
    has_aux: bool = False,
    validation: Validation | None = None,
    checkpoints: Checkpoints | None = None,
    mesh: Mesh | NamedSharding | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    callbacks: Mapping[Any, Any] | None = None,
    progress: bool = False,
) -> FitResult:
    r"""Train a linen `TrainState`, or a `flax.nnx` model with its optimizer.

    Each step evaluates one batch (`optperm.evaluate`), calls the method's `update` with all extra
    arguments of this evaluation, and applies the updates (`optperm.apply_updates`).

    Args:
      state: A `TrainState`, which does not change, or a `flax.nnx` model, which is trained in place. For
        other params, such as those of an Equinox model, pass
        `TrainState.create(apply_fn=None, params=params, tx=tx)`.
      loss_fn: For a `TrainState`, a function `loss_fn(params, batch)` that returns the scalar mean loss;
        for a model, `loss_fn(model, batch)`, which may change the model's state. With padded or masked
        examples, return a pair `(sum, count)` as the loss, the sum of the losses that count and their
        number, both over the batch. If the function has an argument `model_state`, it returns
        `(loss, new_model_state)`; if it has an argument `rng`, it gets a new key in each step.
      data: A tree of arrays with leading axes of the same length, which `key` shuffles in each epoch
        (`shuffled`), or draws with replacement for a sampler; an iterable of batches, of which each is
        requested for its step; or a function that takes the number of the epoch, from 1, and returns an
        iterable. Batches must consist of new arrays: a loader must not reuse its buffers. With several
        processes, each passes all arrays, or an iterable of its own part of each batch.
      optimizer: The `nnx.Optimizer` of the model.
      epochs: The number of the last epoch, counted from the start of the first run.
      steps: The number of the last step, counted in the same way.
      batch_size: For arrays, the number of examples per step over all devices. The rest is left out.
        For a sampler with a kernel from `optperm.bayes.learn_kernel`, pass the batch size of the kernel,
        which the batches of an iterable must have too.
      key: The key of the shuffles: an int in [0, 2**32), or a key of `jax.random`.
      has_aux: If True, the last entry of the tuple that `loss_fn` returns is a dict of scalar metrics,
        which are means over the batch.
      validation: A `Validation`, the metrics of held-out data at the end of each epoch.
      checkpoints: A `Checkpoints`, the folder from which a run resumes.
      mesh: A `jax.sharding.Mesh`, whose first axis (or `axis_name`) divides batches, or the
        `NamedSharding` of a batch. The default is the mesh on which the state is sharded, if any.
        Otherwise, with `axis_name` or several processes, it is a mesh of all devices.
      axis_name: The axis or axes of the mesh over which the method is mapped, in `jax.shard_map`. Pass
        the same value to methods that take `axis_name`, such as `optperm.diloco`. None for one program
        on all devices, in which BatchNorm and dropout see the whole batch.
      callbacks: A dict of functions, or lists of functions, of an `Event`: `{100: f}` calls `f` after
        every 100 steps, and `{"epoch": g}` calls `g` after each epoch and its evaluation. A function
        that returns True stops training. `{"epoch_start": h}` calls
        `h(opt_state, params, full_gradient)` before each epoch, which returns the optimizer state with
        which the epoch begins, such as `optperm.variance.take_snapshot`; or `h(epoch)`, which returns
        such a function or None. With several processes, all processes call the functions.
      progress: If True, show a progress bar.

    Returns:
      A `FitResult`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, optperm
      >>> from optperm.training import TrainState, fit
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> data, model = {"x": x, "y": x @ jnp.array([[1.0], [-2.0], [0.5]])}, nn.Dense(1)
      >>> params = model.init(jax.random.key(1), x)["params"]
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
      >>> result = fit(state, loss_fn, data, epochs=50, batch_size=32)
      >>> bool(result.history.epochs["loss"][-1] < 1e-3)
      True

    Notes:
      With `optperm.agn` and `optperm.diloco`, the params that `fit` returns, evaluates and passes to
      callbacks are the center after a commit of all steps so far. This commit is made on a copy, so it
      changes neither training nor checkpoints. Params that no commit reaches are the mean over replicas,
      and so is the model state; variances of BatchNorm contain the spread of the replicas' means.

      A call of the compiled steps ends at the next event, and after at most 100 steps. Ctrl-C and
      SIGTERM take effect then, and between two batches of an evaluation. Processes exchange signals,
      stops and the sizes of their batches once per call. With local steps, a call ends with a commit.

      An error in a callback, in the data or in `loss_fn` ends the run after a checkpoint of the last
      whole step. Each call of `fit` traces its functions with the current values of outside variables.

    Raises:
      TypeError: If a callback, the data or the state has a wrong type, or a loss or metric is no scalar.
      ValueError: If sizes, shapes, metric names or axis names do not match; if the processes have
        different arguments; or if a method with local steps has no axis, or another axis than `fit`.
      CheckpointError: If a checkpoint cannot be written or read, or if the processes have no common
        folder. `fit` tests both before it trains.
      ImportError: If an optional package that the progress bar or checkpoints need is missing.
    """
    checks.check_key("key", key)
    for name, value, kind in (
        ("validation", validation, Validation),
        ("checkpoints", checkpoints, Checkpoints),
    ):
        if value is not None and not isinstance(value, kind):
            says = f"{name} must be a {kind.__name__}(...) of optperm.training"
            raise TypeError(f"{says}, got {checks.shown(value)}.")
    schedule = Schedule.make(epochs, steps, validation, checkpoints, callbacks)
    processes.check_devices()
    with processes.together():
        model, initial = programs.wrap_model(state, optimizer, loss_fn, has_aux)
        layout = choose_layout(initial.tx, initial, mesh, axis_name)
        if schedule.epoch_start is not None and (layout.own or isinstance(data, Iterator)):
            why = "replicas have states of their own" if layout.own else "an iterator is read once"
            raise ValueError(f'"epoch_start" needs all batches and one state, but {why}.')
        carry = programs.place_state(initial, layout)
        feed = make_feed(data, batch_size, key, layout, carry)
    best = validation.best if validation is not None else None
    facts: dict[str, Any] = {"the kind of model": model.kind, "keep_best": best}
    if jax.process_count() > 1 or checkpoints is not None:
        facts |= feed.facts()
    if jax.process_count() > 1:
        same = {**facts, "the digest of params": processes.digest(initial.params)}
        same |= {"epochs": epochs, "steps": steps, "callbacks": [*map(str, callbacks or ())]}
        if isinstance(data, list | tuple) and isinstance(feed, StreamFeed):
            same["the number of batches"] = len(data)
        of_values: dict[str, Any] = {"validation": (validation, ("batch_size", "every"))}
        of_values |= {"checkpoints": (checkpoints, ("every", "keep", "resume", "on_signal"))}
        for name, (value, fields) in of_values.items():
            same[name] = None if value is None else {f: getattr(value, f) for f in fields}
        processes.check_same(same)
    evaluate = None
    if validation is not None:
        evaluate = Evaluator(validation, batch_size, model, Layout(layout.mesh, layout.batch))
    run = Run(
        Setup(
            source=state,
            optimizer=optimizer,
            model=model,
            carry=carry,
            layout=layout,
            feed=feed,
            key=key,
            schedule=schedule,
            evaluate=evaluate,
            keep_best=best,
            folder=None if checkpoints is None else Folder(checkpoints),
            facts=facts,
        )
    )
    if checkpoints is not None:
        run.resume(checkpoints.resume)
    run.warn_of_state()
    total = min(schedule.epochs * (feed.steps_per_epoch or math.inf), schedule.steps)
    with Interrupt() as interrupt, progress_bar(progress, total) as run.show:
        ended = run.train(interrupt)
    result = dataclasses.replace(run.result(ended), signal=int(interrupt.number))
    run.warn_of_result(result)
    if interrupt.number and (checkpoints is None or checkpoints.on_signal == "raise"):
        if jax.process_index() == 0:
            folder = run.given.folder
            where = "" if folder is None else f", saved in {folder.folder}"
            name = signal.Signals(interrupt.number).name
            says = f"fit was interrupted by {name} after step {result.step}{where}."
            print(says, file=sys.stderr, flush=True)
        signal.raise_signal(interrupt.number)
    return result
