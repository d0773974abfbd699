"""Metrics of a trained model on data that it was not trained on."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from optperm.training import data as datas
from optperm.training.feeds import placed_batches
from optperm.training.layout import Layout
from optperm.training.steps import Subject, made

# Batches that may wait on the devices for those before them.
_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Evaluates a function on all of some data, on all devices.

    Attributes:
      eval_fn: The function.
      data: The data.
      batch_size: Examples at once, where the data are arrays.
      subject: What is evaluated.
      layout: Where.
    """

    eval_fn: Callable[..., Any]
    data: Any
    batch_size: int | None
    subject: Subject
    layout: Layout

    def __post_init__(self) -> None:
        if not callable(self.eval_fn):
            raise TypeError(f"eval_fn must be a function, got {type(self.eval_fn).__name__}.")
        if datas.is_arrays(self.data):
            datas.num_examples("eval_data", self.data)
        else:
            datas.check_iterable("eval_data", self.data)

    def evaluate(self, carry: Any, epoch: int) -> dict[str, float]:
        """The means over all examples, by name, of a carry that all devices share.

        Raises:
          ValueError: If the data give no batch.
        """
        subject = self.subject

        def make(function: Callable[[], Any]) -> Any:
            return jax.jit(lambda carry, batch: subject.evaluated(carry, batch, function()))

        call = made(self.eval_fn, ("evaluated", subject), make)
        rows: list[tuple[dict[str, jax.Array], int]] = []
        # Batches are computed while the next ones are loaded.
        with self.layout.context():
            for batch in self._batches(epoch):
                size = datas.num_examples("A batch of eval_data", batch)
                rows.append((call(carry, batch), size))
                if len(rows) > _AHEAD:
                    jax.block_until_ready(rows[-1 - _AHEAD][0])
        if not rows:
            raise ValueError(
                f"eval_data gives no batch in epoch {epoch}. A generator can be gone through only "
                "once: pass a function that makes one, eval_data=lambda epoch: batches()."
            )
        host = jax.device_get([metrics for metrics, _ in rows])
        sizes = np.array([size for _, size in rows], np.float64)
        return {
            name: float(np.dot(sizes, [float(row[name]) for row in host]) / sizes.sum())
            for name in host[0]
        }

    def _batches(self, epoch: int) -> Iterator[Any]:
        if not datas.is_arrays(self.data):
            source = self.data if hasattr(self.data, "__iter__") else self.data(epoch)
            yield from placed_batches(iter(source), self.layout, "eval_data")
            return
        size = datas.num_examples("eval_data", self.data)
        parts = self.layout.parts if self.layout.mesh is not None else 1
        for low, high in datas.pieces(size, self.batch_size or size, parts):
            batch = jax.tree.map(lambda leaf, low=low, high=high: leaf[low:high], self.data)
            yield self.layout.put_batch(batch, local=False)
