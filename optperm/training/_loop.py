"""`fit`: train a Flax model with any method."""

import dataclasses
import difflib
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Never, get_args

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from optperm.core import checks
from optperm.training import _processes as processes
from optperm.training import _steps as programs
from optperm.training._callbacks import Mode, as_callbacks
from optperm.training._checkpoints import Checkpoints
from optperm.training._data import StreamFeed, is_arrays, make_feed
from optperm.training._layout import Layout, choose_layout, count_idle_devices
from optperm.training._run import FitResult, Run, Setup
from optperm.training._schedule import Schedule
from optperm.training._terminal import Interrupt, progress_bar

# Arguments of Keras and other libraries, and their equivalents here.
_ELSEWHERE = {
    "validation_data": "Pass eval_data, and eval_fn, which computes the metrics.",
    "validation_freq": "Pass eval_every, in steps.",
    "callbacks": "Pass on_epoch_end, or every={100: callback} for a callback every 100 steps.",
    "devices": 'Pass mesh=jax.make_mesh((4,), ("replica",)), for example.',
    "verbose": "Pass progress=True for a progress bar.",
}
# Arguments that are integers of at least 1, or None.
_COUNTS = (
    *("epochs", "steps", "steps_per_call", "eval_batch_size", "eval_every", "checkpoint_every"),
    "checkpoint_keep",
)
# Arguments that need another argument.
_TOGETHER = [("eval_fn", "eval_data"), ("eval_data", "eval_fn"), ("eval_every", "eval_fn")]
_TOGETHER += [(name, "checkpoints") for name in ("resume", "checkpoint_every", "checkpoint_keep")]


def fit(
    state_or_model: Any,
    loss_fn: Callable[..., Any],
    train_data: Any,
    *,
    optimizer: nnx.Optimizer[Any] | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    key: int | jax.Array = 0,
    has_aux: bool = False,
    eval_fn: Callable[..., Any] | None = None,
    eval_data: Any = None,
    eval_batch_size: int | None = None,
    eval_every: int | None = None,
    keep_best: str | tuple[str, str] | None = None,
    mesh: Mesh | NamedSharding | None = None,
    axis_name: str | tuple[str, ...] | None = None,
    every: Mapping[int, Any] | None = None,
    epoch_start: Callable[..., Any] | None = None,
    on_epoch_end: Any = None,
    checkpoints: Any = None,
    checkpoint_every: int | None = None,
    checkpoint_keep: int | None = None,
    resume: bool | int = False,
    progress: bool = False,
    steps_per_call: int = 100,
    on_signal: Literal["raise", "return"] = "raise",
    **unknown: Never,
) -> FitResult:
    r"""Train a linen `TrainState`, or a `flax.nnx` model with its optimizer.

    Each step evaluates one batch (`optperm.evaluate`), calls the method's `update` with all extra
    arguments of this evaluation, and applies the updates (`optperm.apply_updates`).

    Args:
      state_or_model: A `TrainState`, which does not change, or a `flax.nnx` model, which is trained in
        place.
      loss_fn: For a `TrainState`, a function `loss_fn(params, batch)` that returns the scalar mean loss,
        or a pair `(sum, count)` as its loss, as in `optperm.evaluate`. See Notes for padding. If it has
        an argument `model_state`, it returns `(loss, new_model_state)`; if it has an argument `rng`, it
        gets a new key in each step. For a model, a function `loss_fn(model, batch)`, which may change
        the model's state.
      train_data: A tree of arrays with leading axes of the same length, an iterable of batches (a list
        or a data loader; each process passes its part), or a function that takes the number of the
        epoch, from 1, and returns an iterable. Each batch must consist of new arrays: a buffer that a
        loader reuses may change while `fit` is still reading. With `axis_name`, the number of replicas
        must divide the batch size. See Notes.
      optimizer: The `nnx.Optimizer` of the model. With `fit`, any `nnx.Optimizer` sets exact weights.
      epochs: The number of the last epoch, counted from the start of the first run.
      steps: The number of the last step, counted in the same way. With both `epochs` and `steps`,
        training ends at whichever comes first.
      batch_size: For arrays, the number of examples per step over all devices.
      key: The key of the shuffles: an int in [0, 2**32), or a key of `jax.random`.
      has_aux: If True, the last entry of the tuple that `loss_fn` returns is a dict of scalar metrics,
        which are means over the batch.
      eval_fn: A function that computes metrics at the end of each epoch: `eval_fn(params, batch)`, which
        may have an argument `model_state`, or `eval_fn(model, batch)` with a copy in eval mode. It
        returns a dict. Each value is a scalar, the mean over the batch, or a pair of scalars, a sum and
        a count. With masked or weighted examples, return the sum of the weighted values and the sum of
        the weights.
      eval_data: The data for evaluations, in the form of `train_data`. All devices share each batch. An
        evaluation uses the params that `fit` would return if training ended at this step.
      eval_batch_size: For arrays, the number of examples per batch; by default `batch_size`.
      eval_every: The number of steps between additional evaluations. Each evaluation adds a row to
        `history.epochs`, which `EarlyStopping` and `metrics_writer` see. Use this argument for an
        endless stream.
      keep_best: The column of `history.epochs` that determines `best_state` of the result: a name such
        as `"eval_loss"` if smaller is better, or a pair such as `("eval_accuracy", "max")`. The best
        state has the params that were evaluated. Rows before the optimizer reaches its goal do not
        count: the last phase of `optperm.switch_after`, and the sparsity of `optperm.prune_gradually`.
      mesh: A `jax.sharding.Mesh`, whose first axis (or `axis_name`) divides batches, or the
        `NamedSharding` of a batch. The default is the mesh on which the state is sharded, if any.
        Otherwise, with `axis_name` or several processes, it is a mesh of all devices of all processes
        with a single axis, `axis_name` or `"replica"`.
      axis_name: The axis or axes of the mesh over which the method is mapped. Pass the same value to
        methods that take `axis_name`, such as `optperm.agn` and `optperm.diloco`. None for one program
        on all devices. See Notes.
      every: A dict from a number of steps to the function of an `Event`, or the list of functions, to
        call at this interval: `{100: log, 1000: evaluate}`. A function that returns True stops training.
        With several processes, all processes call the functions.
      epoch_start: A function `change(opt_state, params, full_gradient)` that returns the optimizer state
        with which each epoch begins, such as `optperm.variance.take_snapshot` for SVRG; `full_gradient`
        is over all training examples. Alternatively, a function of the epoch's number that returns such
        a function or None.
      on_epoch_end: A function of an `Event`, or a list of functions, called after each epoch and its
        evaluation. A function that returns True stops training. See `EarlyStopping`, `metrics_writer`.
      checkpoints: The folder for checkpoints, which are named by their steps, on any file system that
        `etils.epath` supports, such as `gs://`.
      checkpoint_every: The number of steps between checkpoints. `fit` also writes a checkpoint when
        training ends, even if a callback, the data or `loss_fn` raises an error, but not after a
        `KeyboardInterrupt`.
      checkpoint_keep: The number of newest checkpoints to keep; None keeps all.
      resume: If True, resume from the newest checkpoint, if there is one. A number resumes from the
        checkpoint of this step. The next checkpoint replaces all later ones. See Notes.
      progress: If True, show a progress bar.
      steps_per_call: For arrays, the maximum number of steps per call of a compiled program. Ctrl-C and
        SIGTERM take effect after a call, and between two batches of an evaluation or of a full gradient
        (with several processes, between eight batches); a second Ctrl-C takes effect immediately.
      on_signal: The reaction to Ctrl-C or SIGTERM, after the last checkpoint. `"raise"` prints a line to
        stderr and sends the signal again, which ends a program that does not handle the signal.
        `"return"` returns the result, for a program that checks `result.ended`.
      **unknown: Not allowed. For an argument of another library, the error names the equivalent.

    Returns:
      A `FitResult`.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp, optax, optperm
      >>> from optperm.training import TrainState, fit
      >>> x = jax.random.normal(jax.random.key(0), (64, 3))
      >>> data, model = {"x": x, "y": x @ jnp.array([[1.0], [-2.0], [0.5]])}, nn.Dense(1)
      >>> subspace_optimizer = optperm.dim_reduce(n_components=4)
      >>> tx = optperm.dldr(optax.sgd(0.1), subspace_optimizer, every=2, num_snapshots=5)
      >>> params = model.init(jax.random.key(1), x)["params"]
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
      >>> result = fit(state, loss_fn, data, epochs=12, batch_size=32)
      >>> bool(result.history.epochs["loss"][-1] < 1e-3)
      True

    Notes:
      Line searches and second gradients within a step use the batch statistics and the random key of
      this step. Only the new statistics of the main evaluation are kept.

      On a mesh, one program runs on all devices: batches are sharded, the state keeps its placement, and
      BatchNorm and dropout see the whole batch. With `axis_name`, the method runs in `jax.shard_map`
      over this axis, and each replica takes its part of a batch. With `optperm.agn` and
      `optperm.diloco`, each replica has its own params. The other axes of the mesh stay automatic: on a
      mesh of hosts and devices, pass `mesh=NamedSharding(mesh, P(("host", "device")))` and
      `axis_name="host"` for local steps in which the devices of each host share a batch.

      With several processes, each process passes either all arrays, which are the same in all processes,
      or an iterable of its own part of each batch. All processes need the same number of devices and of
      batches, and parts of equal size.

      With `optperm.agn` and `optperm.diloco`, the params that `fit` returns, evaluates and passes to
      callbacks are the center after a commit of all steps so far. This commit is made on a copy, so it
      changes neither training nor checkpoints. In a phase of `optperm.switch_after` that does not
      commit, the params are the mean over replicas, and `fit` warns. Params that no commit and no
      exchange reaches, as in one part of `optax.partition`, are an error, unless they do not depend on
      the batch. The model state is the mean over replicas. The variances of BatchNorm (`var` beside
      `mean`) also contain the spread of the replicas' means. If replicas step together, BatchNorm sees
      one replica's part of each batch, so give it the same `axis_name`. The returned optimizer state
      belongs to these params; to continue training without this commit, resume from a checkpoint.

      Arrays are shuffled in each epoch with `key` (`optperm.training.shuffled`), or drawn with
      replacement for a sampler (`optperm.constant_sgd`, `sgld`, `sghmc`). Examples at the end that do
      not fill a batch are left out. `fit` requests a batch of an iterable only for its step; several
      processes read up to `steps_per_call` batches ahead, and compare them once per call. To `resume`
      within an epoch, pass a new iterator: `fit` drops the used batches, or restores the state of an
      iterator that has a state.

      With padded or masked examples, return a pair `(sum, count)` as the loss: the sum of the losses
      that count, and their number. The loss is the sum over all replicas divided by the count over all
      replicas, and `loss_count` of the history weighs means over steps. If the second value depends on
      the params and is no count, such as an accuracy, `fit` warns after the first steps. A commit of
      `optperm.agn` or `optperm.diloco` weighs each replica by its counts per example, averaged over the
      steps since the last commit, or over all steps so far with a plan of fragments.

      For a sampler, and with `epoch_start`, `fit` warns before the first step if the loss of the first
      batch is not the mean of the losses of its halves. It also warns if another transformation changes
      the gradient before a sampler, except inside conditionals, such as phases of
      `optperm.switch_after`.

      At rows at least 50 steps apart, `fit` computes one more gradient for params in 16 bits without
      `optperm.widen_params`, and warns once if more than half of their updates round to nothing for 100
      steps.

      At each step, `fit` first adds the row, then calls the callbacks, then writes the checkpoint. When
      training resumes after an error, `fit` first completes the tasks that the error prevented, but does
      not call the callback that raised again. A task that a signal interrupted is done again.

      On the same devices, a resumed run ends with the same bits as an uninterrupted run. With a
      different number of replicas, the replicas take the saved states in turn. `fit` compares the
      arrays, and the arguments that shape the optimizer state, such as axes and criteria, with the
      earlier run. It does not check whether `loss_fn` and other hyperparameters are the same.
      Hyperparameters in the optimizer state (`optax.inject_hyperparams`) come from the earlier run, and
      all others from this run.

      Each call of `fit` traces the functions with the current values of outside variables; changes
      during the call have no effect. Programs that an earlier call has compiled are reused.

    Raises:
      TypeError: If an argument or the result of a function has the wrong type.
      ValueError: If an argument is out of range or contradicts another argument, data contain no
        examples, a checkpoint belongs to another run, replicas would train params apart, or processes
        disagree on params, data or numbers.
      CheckpointError: If a checkpoint cannot be read or written, or if processes do not see the same
        folder. `fit` tests both before it trains.
      ImportError: If an optional package that the progress bar or checkpoints need is missing.
    """
    given = dict(locals())
    _check(given)
    best = (keep_best, "min") if isinstance(keep_best, str) else keep_best
    schedule = Schedule(
        epochs=epochs or math.inf,
        steps=steps or math.inf,
        steps_per_call=int(steps_per_call),
        eval_every=eval_every or math.inf,
        checkpoint_every=checkpoint_every or math.inf,
        every={int(n): as_callbacks(functions) for n, functions in (every or {}).items()},
        on_epoch_end=as_callbacks(on_epoch_end),
    )
    processes.check_devices()
    with processes.together():
        model, initial = programs.wrap_model(state_or_model, optimizer, loss_fn, has_aux)
        layout = choose_layout(initial.tx, initial, mesh, axis_name)
        if layout.mesh is None and (idle := count_idle_devices(initial)):
            devices = jax.local_device_count()
            says = f"{idle} of {devices} devices stay idle: pass mesh=jax.make_mesh(({devices},), "
            says += (
                '("replica",)) to fit, or, to use only one, place the state on it (jax.device_put).'
            )
            warnings.warn(says, stacklevel=2)
        if epoch_start is not None and (layout.own or isinstance(train_data, Iterator)):
            why = "replicas have states of their own" if layout.own else "an iterator is read once"
            raise ValueError(f"epoch_start needs all batches and one state, but {why}.")
        carry = programs.place_state(initial, layout)
        feed = make_feed(train_data, batch_size, key, layout, schedule.steps_per_call, carry)
    facts: dict[str, Any] = {"the kind of model": model.kind, "keep_best": best}
    if jax.process_count() > 1 or checkpoints is not None:
        facts |= feed.facts()
    if jax.process_count() > 1:
        _check_same(given, facts, initial, feed)
    evaluator = None
    if eval_fn is not None:
        alone = Layout(layout.mesh, layout.batch)
        size = eval_batch_size or batch_size
        evaluator = programs.Evaluator(eval_fn, eval_data, size, model, alone)
    run = Run(
        Setup(
            source=state_or_model,
            optimizer=optimizer,
            model=model,
            carry=carry,
            layout=layout,
            feed=feed,
            key=key,
            schedule=schedule,
            evaluate=evaluator,
            epoch_start=epoch_start,
            keep_best=best,
            checkpoints=None if checkpoints is None else Checkpoints(checkpoints, checkpoint_keep),
            facts=facts,
        )
    )
    run.resume(resume)

    total = min(schedule.epochs * (feed.steps_per_epoch or math.inf), schedule.steps)
    run.warn_of_state()
    run.warn_if_too_short(total)
    with Interrupt() as interrupt, progress_bar(progress, total) as run.show:
        ended = run.train(interrupt)
    result = dataclasses.replace(run.result(ended), signal=int(interrupt.number))
    run.warn_of_result(result, total)
    if interrupt.number and on_signal == "raise":
        if jax.process_index() == 0:
            kept = run.given.checkpoints
            where = "" if kept is None else f", saved in {kept.folder}"
            name = signal.Signals(interrupt.number).name
            says = f"fit was interrupted by {name} after step {result.step}{where}."
            print(says, file=sys.stderr, flush=True)
        signal.raise_signal(interrupt.number)
    return result


def _check_same(given: Mapping[str, Any], facts: Mapping[str, Any], state: Any, feed: Any) -> None:
    """Check that all processes have the same arguments, params and number of batches."""
    same = {**facts, "the digest of params": processes.digest(state.params)}
    same |= {name: given[name] for name in (*_COUNTS, "resume")}
    same |= {"checkpoints, in any folder,": given["checkpoints"] is not None}
    data = given["train_data"]
    if isinstance(data, list | tuple) and isinstance(feed, StreamFeed):
        same["the number of batches"] = len(data)
    processes.check_same(same)


def _check(given: Mapping[str, Any]) -> None:
    """Check those arguments of `fit`, by name, that can be checked alone."""
    for name in given["unknown"]:
        near = difflib.get_close_matches(name, given, n=1)
        hint = _ELSEWHERE.get(name, f"Did you mean {near[0]}?" if near else "")
        raise TypeError(f"fit() got an unexpected keyword argument {name!r}. {hint}".strip())
    counts = {name: given[name] for name in _COUNTS if given[name] is not None}
    every = given["every"] or {}
    for name, value in (counts | {f"every[{n!r}]": n for n in every}).items():
        checks.check_count(name, value)
    called = {"on_epoch_end": given["on_epoch_end"]} | {f"every[{n!r}]": every[n] for n in every}
    for name, value in called.items():
        for function in as_callbacks(value):
            if not callable(function):
                wanted = "a function of an Event, or a list of such functions"
                raise TypeError(f"{name} must be {wanted}, got {function!r}.")
    checks.check_key("key", given["key"])
    if not isinstance(given["resume"], bool):
        checks.check_count("resume, unless True or False,", given["resume"], minimum=0)
    checks.check_choice("on_signal", given["on_signal"], ("raise", "return"))
    if given["epochs"] is None and given["steps"] is None:
        raise ValueError("Pass epochs or steps, the length of training.")
    for name, needed in _TOGETHER:
        if given[needed] is None and not (given[name] is None or given[name] is False):
            raise ValueError(f"{name} needs {needed}: pass both.")
    data = given["eval_data"]
    if data is not None and not is_arrays("eval_data", data) and isinstance(data, Iterator):
        raise TypeError("eval_data is an iterator, which can be read only once: pass a list.")
    if isinstance(given["keep_best"], tuple):
        checks.check_choice("the mode of keep_best", given["keep_best"][1], get_args(Mode))
