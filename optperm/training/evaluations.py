"""Metrics of a trained model on data that it was not trained on."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from optperm.training import data as datas
from optperm.training.layout import Layout
from optperm.training.steps import Model, made
from optperm.training.train_state import TrainState

# Batches that may wait on the devices for those before them.
_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates a function on all of some data, of arrays `batch_size` examples at once."""

    eval_fn: Callable[..., Any]
    data: Any
    batch_size: int | None = None
    model: Model = Model()  # noqa: RUF009
    layout: Layout = Layout()  # noqa: RUF009

    def __post_init__(self) -> None:
        if not callable(self.eval_fn):
            raise TypeError(f"eval_fn must be a function, got {type(self.eval_fn).__name__}.")
        if datas.is_arrays(self.data):
            datas.num_examples("eval_data", self.data)
        else:
            datas.check_iterable("eval_data", self.data)

    def evaluate(self, state: TrainState, epoch: int) -> dict[str, float]:
        """The means over all examples, by name; a ValueError if there are none."""
        model, layout = self.model, self.layout

        def make(function: Callable[[], Any]) -> Any:
            return jax.jit(lambda state, batch: model.evaluated(state, batch, function()))

        call = made(self.eval_fn, ("evaluated", model), make)
        rows, sizes = [], []
        with layout.context():
            if datas.is_arrays(self.data):
                size = datas.num_examples("eval_data", self.data)
                batches = datas.placed_pieces(self.data, self.batch_size or size, layout)
            else:
                stream = datas.open_stream("eval_data", self.data, epoch)
                batches = datas.placed(stream, layout, "eval_data")
            for batch in batches:  # the next ones are loaded while it is computed
                sizes.append(datas.num_examples("A batch of eval_data", batch))
                rows.append(call(state, batch))
                if len(rows) > _AHEAD:
                    jax.block_until_ready(rows[-1 - _AHEAD])
        if not rows:
            raise ValueError(
                f"eval_data gives no batch in epoch {epoch}. A generator can be gone through only "
                "once: pass a function that makes one, eval_data=lambda epoch: batches()."
            )
        host, weights = jax.device_get(rows), np.array(sizes, np.float64) / sum(sizes)
        return {name: float(np.dot(weights, [row[name] for row in host])) for name in host[0]}
