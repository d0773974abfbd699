"""Metrics of a trained model on data that it was not trained on."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
import numpy as np

from optperm.training.data import as_arrays, check_iterable, is_arrays, num_examples
from optperm.training.programs import LinenProgram, NnxProgram, evaluation_call


class Evaluator:
    """Evaluates a function on all of some data.

    Args:
      program: Of which carries come.
      eval_fn: The function.
      data: The data.
      batch_size: Examples at once, where the data are arrays.
    """

    def __init__(
        self,
        program: LinenProgram | NnxProgram,
        eval_fn: Callable[..., Any],
        data: Any,
        batch_size: int | None,
    ) -> None:
        self._call, self._data, self._batch_size = _jitted(program, eval_fn), data, batch_size

    @classmethod
    def of(
        cls,
        program: LinenProgram | NnxProgram,
        eval_fn: Any,
        data: Any,
        batch_size: int | None,
    ) -> Self | None:
        """From the arguments of `fit`; None if there are none.

        Raises:
          TypeError: If one of them is of the wrong type.
          ValueError: If one is missing, or there are no examples.
        """
        if eval_fn is None and data is None:
            return None
        if eval_fn is None or data is None:
            missing = "eval_fn" if eval_fn is None else "eval_data"
            raise ValueError(f"eval_fn and eval_data go together: pass {missing} as well.")
        if not callable(eval_fn):
            raise TypeError(f"eval_fn must be a function, got {type(eval_fn).__name__}.")
        if is_arrays(data):
            num_examples("eval_data", data)
        else:
            check_iterable("eval_data", data)
        return cls(program, eval_fn, data, batch_size)

    def evaluate(self, carry: Any, epoch: int) -> dict[str, float]:
        """The means over all examples, by name."""
        sums: dict[str, float] = {}
        count = 0
        # A batch is computed while the next is loaded.
        pending = ((self._call(carry, batch), size) for batch, size in self._batches(epoch))
        first = next(pending, None)
        if first is None:
            raise ValueError(
                f"eval_data gives no batch in epoch {epoch}. A generator can be gone through only "
                "once: pass a function that makes one, eval_data=lambda epoch: batches()."
            )
        for metrics, size in itertools.chain([first], pending):
            count += size
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + size * float(value)
        return {name: total / count for name, total in sums.items()}

    def _batches(self, epoch: int) -> Iterator[tuple[Any, int]]:
        if not is_arrays(self._data):
            source = self._data if hasattr(self._data, "__iter__") else self._data(epoch)
            for batch in source:
                arrays = as_arrays(batch)
                yield arrays, num_examples("A batch of eval_data", arrays)
            return
        size = num_examples("eval_data", self._data)
        step = min(self._batch_size or size, size)
        for low in range(0, size, step):
            batch = jax.tree.map(
                lambda leaf, low=low: np.asarray(leaf[low : low + step]), self._data
            )
            yield batch, min(step, size - low)


@functools.lru_cache(maxsize=32)
def _jitted(program: LinenProgram | NnxProgram, eval_fn: Callable[..., Any]) -> Any:
    return jax.jit(evaluation_call(program, eval_fn))
