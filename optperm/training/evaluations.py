"""Metrics of a trained model on data that it was not trained on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optperm.contract import checks
from optperm.training import data as datas
from optperm.training.layout import Layout
from optperm.training.steps import Model, made
from optperm.training.train_state import TrainState


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates a function on all of some data, of arrays `batch_size` examples at once."""

    eval_fn: Callable[..., Any]
    data: Any
    batch_size: int | None = None
    model: Model = Model()  # noqa: RUF009
    layout: Layout = Layout()  # noqa: RUF009

    def __post_init__(self) -> None:
        checks.check_function("eval_fn", self.eval_fn, "(params, batch) or (model, batch)")
        datas.is_arrays("eval_data", self.data)

    def evaluate(self, state: TrainState, epoch: int) -> dict[str, float]:
        """The means over all examples, by name; a ValueError if there are none."""
        model, rows, sizes = self.model, list[Any](), list[int]()

        def make(function: Callable[[], Any]) -> Any:
            return jax.jit(lambda state, batch: model.evaluated(state, batch, function()))

        call = made(self.eval_fn, ("evaluated", model), make)
        with self.layout.context():
            what = self.data, epoch, self.batch_size, self.layout
            for batch in datas.pieces("eval_data", *what):  # loaded while others are computed
                sizes.append(datas.num_examples("A batch of eval_data", batch))
                rows.append(call(state, batch))
                jax.block_until_ready(rows[: -datas.AHEAD][-1:])
        host, weights = jax.device_get(rows), np.array(sizes, np.float64) / sum(sizes)
        return {name: float(np.dot(weights, [row[name] for row in host])) for name in host[0]}
