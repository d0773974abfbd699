"""`fit`: trains a Flax model by any method."""

import dataclasses
import difflib
import math
import signal
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Never, get_args

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from optperm.contract import checks
from optperm.training.callbacks import Mode
from optperm.training.data import is_arrays
from optperm.training.run import COUNTS, FitResult, Run
from optperm.training.terminal import Interrupt, progress_bar

# What is called something else in Keras, and what does the same here.
_ELSEWHERE = {
    "validation_data": "Pass eval_data, and eval_fn, which says what to evaluate.",
    "validation_freq": "Pass eval_every, in steps.",
    "callbacks": "Pass on_epoch_end, or every={100: callback} for one that is called by steps.",
    "verbose": "Pass progress=True for a bar.",
}
# What functions among the arguments are called with, and which arguments need another one.
_FUNCTIONS = dict.fromkeys(("loss_fn", "eval_fn"), "(params, batch) or (model, batch)")
_FUNCTIONS["epoch_start"] = "(opt_state, params, full_gradient)"
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
    seed: int = 0,
    has_aux: bool = False,
    eval_fn: Callable[..., Any] | None = None,
    eval_data: Any = None,
    eval_batch_size: int | None = None,
    eval_every: int | None = None,
    keep_best: str | tuple[str, str] | None = None,
    mesh: Mesh | NamedSharding | None = None,
    devices: int | None = None,
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
    r"""Train a linen `TrainState`, or a model of `flax.nnx` with its optimizer.

    Every step is `optperm.evaluate` on one batch, the method's update with all extra arguments it may
    ask for, and `optperm.apply_updates`. Line searches and second gradients within a step see the batch
    statistics and the random key of that step; only the main evaluation's new statistics are kept.

    On a mesh one program runs on all devices: batches are sharded, the state lies as it was passed, and
    BatchNorm and dropout see the whole batch. A method that was built with the name of a mapped axis
    runs by `jax.shard_map` over that axis instead, each device with its part of a batch; `optperm.agn`
    and `optperm.diloco` do, each replica with params of its own.

    Args:
      state_or_model: A `TrainState`, which is left alone; or a model of `flax.nnx`, trained in place.
      loss_fn: For a `TrainState` `loss_fn(params, batch)`, the scalar mean loss as in
        `optperm.evaluate`. It may take `model_state` by name as well, and then returns
        `(loss, new_model_state)`, and `rng`, a key of each step. For a model `loss_fn(model, batch)`,
        which may change its state. As with `jax.jit`, what is compiled of a function object is used
        again: a value from outside that has changed since is not seen.
      train_data: A tree of arrays that agree in their leading axis, shuffled anew each epoch by `seed`
        (`optperm.training.shuffled`), for a sampler (`optperm.constant_sgd`, `sgld`, `sghmc`) drawn with
        replacement; a last part that fills no batch is left out. Or an iterable of batches (a list, a
        data loader), of each process its part, or a function of the epoch's number, from 1, that gives
        one; no batch is asked for before its step. To `resume` within an epoch, pass a new iterator: it
        drops the batches that were taken, or takes the kept state of one that has such.
      optimizer: The `nnx.Optimizer` of the model. Weights are placed exactly with any.
      epochs: When to end, counted from the start of the first run.
      steps: Likewise, in steps; with both, whatever comes first.
      batch_size: Examples a step of all devices together, for arrays.
      seed: Seed of the shuffles.
      has_aux: Whether `loss_fn` returns a dict of scalar metrics, means over the batch, as the last of a
        tuple.
      eval_fn: What to evaluate at the end of each epoch: `eval_fn(params, batch)`, which may take
        `model_state`, or `eval_fn(model, batch)` with a copy in eval mode. It returns a dict of metrics,
        each a scalar, its mean over the batch, or a pair of scalars, a sum and a count: with masked or
        weighted examples, the sum of the weighted values and that of the weights.
      eval_data: What to evaluate on, as `train_data`. All devices share each batch.
      eval_batch_size: Examples at once, for arrays; `batch_size` by default.
      eval_every: After how many steps each to evaluate as well, and to add a row to `history.epochs`,
        which `EarlyStopping` and `metrics_writer` see; for a stream without an end.
      keep_best: The column of `history.epochs` by which the result's `best_state` is chosen, such as
        `"eval_loss"`, of which less is better, or `("eval_accuracy", "max")`.
      mesh: A `jax.sharding.Mesh`, whose first axis (or that which the method names) shards batches, or
        the `NamedSharding` of a batch. By default the mesh on which the state is sharded, if it is.
      devices: Short for a mesh of so many devices of each process, along the axis `"replica"`; of
        several processes (`jax.distributed`) one each by default.
      every: Functions of an `Event`, or lists of such, by the number of steps between their calls:
        `{100: log, 1000: evaluate}`. True stops. With several processes all of them call them.
      epoch_start: A function `change(opt_state, params, full_gradient)` that gives the optimizer state
        with which each epoch begins, such as `optperm.take_snapshot` for SVRG; the gradient is over all
        training examples. Or a function of the epoch's number that gives such a function, or None.
      on_epoch_end: A function of an `Event`, or a list of such, called after each epoch and its
        evaluation. True stops. See `EarlyStopping` and `metrics_writer`.
      checkpoints: The folder of the checkpoints, which are named by their steps; of any file system that
        `etils.epath` knows, `gs://` too.
      checkpoint_every: After how many steps each to write one. One is written in any case when training
        ends, by an error of a callback, of the data or of `loss_fn` too.
      checkpoint_keep: How many of the newest to keep; None for all.
      resume: Whether to go on from the newest checkpoint, if there is one, or from that of a step; what
        was kept after it is overwritten. On the same devices it ends bit for bit as if it had never
        stopped; another number of replicas takes the kept ones in turn. Neither `loss_fn` nor the
        method's hyperparameters are compared.
      progress: Whether to show a bar.
      steps_per_call: The most steps by one call of a compiled program, for arrays. Ctrl-C and SIGTERM
        take effect after a call; a second Ctrl-C at once.
      on_signal: What follows Ctrl-C or SIGTERM after the last checkpoint: `"raise"` says so on stderr
        and sends the signal again, which ends a program that does not handle it; `"return"` is for a
        program that looks at `result.ended`.
      **unknown: None; what other libraries call by another name is refused with the name here.

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
      >>> data, model = {"x": x, "y": x @ jnp.array([[1.0], [-2.0], [0.5]])}, nn.Dense(1)
      >>> subspace_optimizer = optperm.dim_reduce(n_components=4)
      >>> tx = optperm.dldr(optax.sgd(0.1), subspace_optimizer, sample_every=2, num_samples=5)
      >>> params = model.init(jax.random.key(1), x)["params"]
      >>> state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((model.apply({"params": params}, batch["x"]) - batch["y"]) ** 2)
      >>> result = fit(state, loss_fn, data, epochs=12, batch_size=32)
      >>> bool(result.history.epochs["loss"][-1] < 1e-3)
      True
    """
    given = dict(locals())
    _check(given)
    run = Run(types.SimpleNamespace(**given))
    most = math.inf if epochs is None else epochs, math.inf if steps is None else steps
    total = min(most[0] * (run.feed.steps_per_epoch or math.inf), most[1])
    with Interrupt() as interrupt, progress_bar(progress, total) as run.show:
        ended = run.train(*most, interrupt)
    result = dataclasses.replace(run.result(ended), signal=int(interrupt.number))
    run.warn_if_diverged()
    if interrupt.number and on_signal == "raise":
        if jax.process_index() == 0:
            where = "" if run.checkpoints is None else f", kept in {run.checkpoints.folder}"
            name = signal.Signals(interrupt.number).name
            says = f"fit was interrupted by {name} after step {result.step}{where}."
            print(says, file=sys.stderr, flush=True)
        signal.raise_signal(interrupt.number)
    return result


def _check(given: dict[str, Any]) -> None:
    """Raise what `fit` says about arguments that can be judged by themselves."""
    for name in given["unknown"]:
        near = difflib.get_close_matches(name, given, n=1)
        hint = _ELSEWHERE.get(name, f"Did you mean {near[0]}?" if near else "")
        raise TypeError(f"fit() got an unexpected keyword argument {name!r}. {hint}".strip())
    for name in COUNTS:
        if given[name] is not None:
            checks.check_count(name, given[name])
    checks.check_seed("seed", given["seed"])
    checks.check_flag("has_aux", given["has_aux"])
    checks.check_choice("on_signal", given["on_signal"], ("raise", "return"))
    for name, arguments in _FUNCTIONS.items():
        if name == "loss_fn" or given[name] is not None:
            checks.check_function(name, given[name], arguments)
    if given["epochs"] is None and given["steps"] is None:
        raise ValueError("Pass epochs or steps: how long to train.")
    if not isinstance(given["resume"], bool):
        checks.check_count("resume", given["resume"], minimum=0)
    for name, needed in _TOGETHER:
        if given[needed] is None and not (given[name] is None or given[name] is False):
            raise ValueError(f"{name} goes with {needed}: pass {needed} as well.")
    if not isinstance(given["every"], Mapping | None):
        raise TypeError(f"every must be a dict such as {{100: log}}, got {given['every']!r}.")
    for n in given["every"] or {}:
        checks.check_count("a key of every", n)
    _check_evaluation(given)


def _check_evaluation(given: dict[str, Any]) -> None:
    """Look at what to evaluate and to keep; spell out `keep_best` as a column and a mode."""
    data, best = given["eval_data"], given["keep_best"]
    if data is not None and not is_arrays("eval_data", data) and isinstance(data, Iterator):
        says = "a list, a data loader, or a function of the epoch's number that gives one"
        raise TypeError(
            f"eval_data is an iterator, which can be gone through only once: pass {says}."
        )
    if best is None:
        return
    given["keep_best"] = best = (best, "min") if isinstance(best, str) else best
    if not (isinstance(best, tuple) and len(best) == 2 and isinstance(best[0], str)):
        wanted = "a column such as 'eval_loss', or ('eval_accuracy', 'max')"
        raise TypeError(f"keep_best must be {wanted}, got {best!r}.")
    checks.check_choice("the mode of keep_best", best[1], get_args(Mode))
