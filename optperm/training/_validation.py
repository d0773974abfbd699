"""Validation: metrics of held-out data during training."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, get_args

import jax
import numpy as np
from jax.tree_util import Partial

from optperm.core import checks
from optperm.core.fresh_jit import fresh_jit
from optperm.training import _data as datas
from optperm.training._callbacks import Mode
from optperm.training._layout import Layout
from optperm.training._terminal import Interrupt
from optperm.training._train_state import Model, TrainState


@dataclasses.dataclass(frozen=True)
class Validation:
    """The metrics that `fit` computes at the end of each epoch, with the params that it would return.

    Attributes:
      fn: A function `fn(params, batch)`, which may have an argument `model_state`, or `fn(model, batch)`
        with a copy of the `flax.nnx` model in eval mode. It returns a dict. Each value is a scalar, the
        mean over the batch, or a pair of scalars, a sum and a count: with masked or weighted examples,
        the sum of the weighted values and the sum of the weights. The history has a value as
        `eval_<name>`.
      data: Held-out data in the forms that `fit` takes, except an iterator. All devices share a batch.
      batch_size: For arrays, the number of examples per batch; by default the one of `fit`.
      every: The number of steps between further evaluations. Each adds a row to `history.epochs`, which
        `EarlyStopping` and `metrics_writer` see. An endless stream needs this number.
      keep_best: The column of `history.epochs` that determines `best_state` of the result: a name such
        as `"eval_loss"` if smaller is better, or a pair such as `("eval_accuracy", "max")`. Rows before
        the optimizer reaches its goal do not count: the last phase of `optperm.switch_after`, and the
        sparsity of `optperm.prune_gradually`.

    Example:
      >>> import jax.numpy as jnp
      >>> from optperm.training import Validation
      >>> def error(params, batch):
      ...     return {"error": jnp.mean(jnp.abs(batch["x"] @ params["w"] - batch["y"]))}
      >>> held_out = {"x": jnp.ones((8, 2)), "y": jnp.ones(8)}
      >>> validation = Validation(error, held_out, keep_best="eval_error")  # fit(..., validation=...)
    """

    fn: Callable[..., Any]
    data: Any
    _: dataclasses.KW_ONLY
    batch_size: int | None = None
    every: int | None = None
    keep_best: str | tuple[str, str] | None = None

    def __post_init__(self) -> None:
        if not callable(self.fn):
            got = checks.shown(self.fn)
            raise TypeError(f"Validation.fn must be a function of params and a batch, got {got}.")
        if not datas.is_arrays("Validation.data", self.data) and isinstance(self.data, Iterator):
            raise TypeError(
                "Validation.data is an iterator, which can be read only once: pass a list."
            )
        for name in ("batch_size", "every"):
            if getattr(self, name) is not None:
                checks.check_count(f"Validation.{name}", getattr(self, name))
        if self.best is not None:
            if len(self.best) != 2 or not isinstance(self.best, tuple):
                wanted = 'a column, or a pair such as ("eval_accuracy", "max")'
                raise TypeError(f"Validation.keep_best must be {wanted}, got {self.keep_best!r}.")
            checks.check_choice("the mode of Validation.keep_best", self.best[1], get_args(Mode))

    @property
    def best(self) -> tuple[str, str] | None:
        """The column of the best row, and its mode."""
        return (self.keep_best, "min") if isinstance(self.keep_best, str) else self.keep_best


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A function that computes means of metrics over all examples, `batch_size` at once for arrays."""

    given: Validation
    batch_size: int | None
    model: Model
    layout: Layout

    @functools.cached_property
    def _compute(self) -> Callable[..., Any]:
        def compute(state: TrainState, batch: Any) -> dict[str, Any]:
            return self.model.compute_metrics(state, batch, self.given.fn)

        return fresh_jit(compute)

    def _read(self, epoch: int, interrupt: Interrupt | None = None) -> Iterator[Any]:
        size = self.given.batch_size or self.batch_size
        what = "Validation.data", self.given.data
        return datas.read_all(*what, epoch, size, self.layout, interrupt)

    def columns(self, state: TrainState) -> list[str] | None:
        """Return the columns that this adds to the history; None for a stream, which is not read."""
        if not datas.is_arrays("Validation.data", self.given.data):
            return None
        batch = next(self._read(1))
        with self.layout.context():
            forms = jax.eval_shape(self.model.compute_metrics, state, batch, Partial(self.given.fn))
        return [f"eval_{name}" for name in forms]

    def __call__(
        self, state: TrainState, epoch: int = 1, interrupt: Interrupt | None = None
    ) -> dict[str, float]:
        """Return the means; a signal raises `Interrupted` between two batches."""
        rows = list[Any]()
        with self.layout.context():
            for batch in self._read(epoch, interrupt):
                rows.append(self._compute(state, batch))
                # Load the next batches during the computation of the last few.
                jax.block_until_ready(rows[: -datas.AHEAD][-1:])
        host = jax.device_get(rows)
        if different := [list(row) for row in host if row.keys() != host[0].keys()]:
            says = f"got {list(host[0])} and {different[0]}"
            raise ValueError(f"Validation.fn must return the same metrics for every batch, {says}.")
        table: dict[str, Any] = {k: np.array([row[k] for row in host]) for k in host[0]}
        sums = {k: pairs.sum(axis=0, dtype=np.float64) for k, pairs in table.items()}
        return {k: float(total / n) if n else math.nan for k, (total, n) in sums.items()}
