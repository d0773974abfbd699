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
        if datas.is_arrays(self.data):
            datas.num_examples("eval_data", self.data)
        else:
            datas.check_iterable("eval_data", self.data, may_be_callable=True)

    def evaluate(self, state: TrainState, epoch: int) -> dict[str, float]:
        """The means over all examples, by name; a ValueError if there are none."""
        model, layout, rows, sizes = self.model, self.layout, list[Any](), list[int]()

        def make(function: Callable[[], Any]) -> Any:
            return jax.jit(lambda state, batch: model.evaluated(state, batch, function()))

        call = made(self.eval_fn, ("evaluated", model), make)
        with layout.context():
            if datas.is_arrays(self.data):
                size = self.batch_size or datas.num_examples("eval_data", self.data)
                batches = datas.placed_pieces(self.data, size, layout)
            else:
                stream = datas.open_stream("eval_data", self.data, epoch)
                batches = datas.placed("eval_data", stream, layout)
            for batch in batches:  # the next ones are loaded while it is computed
                sizes.append(datas.num_examples("A batch of eval_data", batch))
                rows.append(call(state, batch))
                jax.block_until_ready(rows[: -datas.AHEAD][-1:])
        if not rows:
            raise datas.no_batch("eval_data", epoch)
        host, weights = jax.device_get(rows), np.array(sizes, np.float64) / sum(sizes)
        return {name: float(np.dot(weights, [row[name] for row in host])) for name in host[0]}
