"""Where the batches of an epoch come from, and the compiled steps that take them."""

import concurrent.futures
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optperm.contract import checks
from optperm.contract.dtypes import cast_like
from optperm.contract.mapped_axes import mark_varying
from optperm.training.data import check_divisible, num_examples, order_of, shuffle_key
from optperm.training.interrupt import Interrupt
from optperm.training.programs import Program, agreed
from optperm.training.replicas import AXIS, Replicas

# Rows of metrics that a call gives back at least, so that one program serves calls of most lengths.
_ROWS = 1024
# Of each step by name, float32 (steps,).
Columns = dict[str, np.ndarray]


class Fed(NamedTuple):
    """What came of some steps.

    Attributes:
      carry: After them.
      columns: Metrics of each.
      steps: How many.
      is_over: Whether the epoch ends with them.
    """

    carry: Any
    columns: Columns
    steps: int
    is_over: bool


class Feed(Protocol):
    """A source of batches, with the steps that take them."""

    def prepare(self, carry: Any) -> None:
        """Compiles what can be compiled before the first step."""
        ...

    def begin(self, epoch: int, offset: int) -> None:
        """Goes to a step of an epoch; epochs count from 1, steps from 0."""
        ...

    def run(
        self, carry: Any, limit: int, interrupt: Interrupt, on_interrupt: Callable[[], None]
    ) -> Fed:
        """Takes steps until as many are taken, or the epoch is over. The carry is given up."""
        ...

    def all_batches(self, epoch: int, chunk: int, *, few: bool = False) -> Iterator[Any]:
        """All examples of an epoch, placed, with about `chunk` on each device at once if it may."""
        ...

    def close(self) -> None:
        """Ends what it runs beside the main thread, without waiting for it."""
        ...

    def facts(self) -> dict[str, Any]:
        """What tells the batches from those of another run: names and JSON values."""
        ...


def stable_step(program: Program, replicas: Replicas, *, own: bool) -> Callable[..., Any]:
    """The program's step, with a carry of the same types after it as before it."""
    axes = (AXIS,) if own and replicas.mesh is not None else ()

    def step(carry: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        new, metrics = program.step(carry, batch)
        checks.check_same_tree(
            "The state after a step", new, carry, source="the state before it", dtypes=False
        )
        return mark_varying((cast_like(new, carry), metrics), axes)

    return step


@dataclasses.dataclass(frozen=True)
class _ManySteps:
    """Steps on examples that lie on the devices, any number of them by one compiled program."""

    program: Program
    replicas: Replicas
    own: bool
    rows: int

    def __call__(self, carry: Any, shared: Any, _: Any) -> tuple[Any, dict[str, jax.Array]]:
        data, order, first, last = shared
        mapped = self.replicas.axis_name
        hand = 0 if mapped is None else jax.lax.axis_index(mapped)
        # Traced once, and used twice.
        step = jax.jit(stable_step(self.program, self.replicas, own=self.own), inline=True)

        def batch_at(t: jax.Array) -> Any:
            indices = order[t][hand]
            return jax.tree.map(lambda leaf: leaf[indices], data)

        metrics = jax.eval_shape(step, carry, batch_at(first))[1]
        # Once a call the replicas agree on metrics, so that steps stay local.
        axes = () if mapped is None else (AXIS,)
        columns = mark_varying(
            {name: jnp.zeros((self.rows,), jnp.float32) for name in metrics}, axes
        )

        def body(t: jax.Array, state: tuple[Any, Any]) -> tuple[Any, Any]:
            carry, columns = state
            carry, row = step(carry, batch_at(t))
            columns = {
                name: jax.lax.dynamic_update_index_in_dim(column, row[name], t - first, 0)
                for name, column in columns.items()
            }
            return carry, mark_varying(columns, axes)

        # Bounds that are arguments: however steps are grouped into calls, one program takes them all,
        # so that a run that was interrupted ends bit for bit like one that was not.
        carry, columns = jax.lax.fori_loop(first, last, body, (carry, columns))
        return carry, agreed(columns)


@dataclasses.dataclass(frozen=True)
class OneStep:
    """A step on a batch that is brought."""

    program: Program
    replicas: Replicas
    own: bool

    def __call__(self, carry: Any, _: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        """The carry after the step, and the step's metrics."""
        carry, metrics = stable_step(self.program, self.replicas, own=self.own)(carry, batch)
        return carry, agreed(metrics)


# Kept from one call of `fit` to the next, by what they do and not by which object does it.
@functools.lru_cache(maxsize=32)
def jitted(function: _ManySteps | OneStep) -> tuple[Any, dict[Any, Any]]:
    """A function on every replica, and what it has been compiled into."""
    return function.replicas.each(function, own=function.own, donate=True), {}


def _compiled(function: _ManySteps, *arguments: Any) -> Any:
    on_replicas, known = jitted(function)
    leaves, structure = jax.tree.flatten(arguments)
    forms = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    names = ("jax_enable_x64", "jax_default_matmul_precision")
    settings = tuple(getattr(jax.config, name) for name in names)
    key = (structure, forms, settings)
    if key not in known:
        known[key] = on_replicas.lower(*arguments).compile()
    return known[key]


@functools.lru_cache(maxsize=32)
def _dealing(replicas: Replicas, size: int, used: int, steps: int) -> Any:
    """From a key and an epoch, the indices of its examples: int32 (steps, replicas, of each)."""

    def dealt(key: jax.Array, epoch: jax.Array) -> jax.Array:
        return order_of(key, epoch, size)[:used].reshape(steps, replicas.size, -1)

    return replicas.jit(dealt)


class ArrayFeed:
    """Examples in memory, shuffled anew in each epoch; all of them are kept on each device.

    Each epoch's shuffle is dealt out: the replicas share each batch.

    Args:
      data: A tree of arrays of one leading axis.
      batch_size: Examples a step, of all replicas together.
      seed: Seed of the shuffles.
      program: What a step does.
      replicas: Where.
      own: Whether each replica has a carry of its own.
      steps_a_call: The most steps by one call of the compiled program; None for a whole epoch.

    Raises:
      TypeError: If `batch_size` or `seed` is of the wrong type.
      ValueError: If one is out of range, there are no examples, or the leaves disagree.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int,
        seed: int,
        program: Program,
        replicas: Replicas,
        own: bool,
        steps_a_call: int | None,
    ) -> None:
        self._host = data
        self._size = num_examples("train_data", data)
        checks.check_count("batch_size", batch_size)
        checks.check_seed("seed", seed)
        if batch_size > self._size:
            raise ValueError(
                f"batch_size must be at most the number of examples in train_data, {self._size}, got "
                f"{batch_size}."
            )
        check_divisible(batch_size, replicas, "batch_size")
        self.steps_per_epoch = self._size // batch_size
        self._key = shuffle_key(seed)
        self._batch_size, self._seed, self._replicas = batch_size, seed, replicas
        self._steps_a_call = min(steps_a_call or self.steps_per_epoch, self.steps_per_epoch)
        rows = min(max(_ROWS, self._steps_a_call), self.steps_per_epoch)
        self._many = _ManySteps(program, replicas, own, rows)
        # A compiled call blocks its thread; one of its own leaves the main one free for Ctrl-C.
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._order_of = _dealing(
            replicas, self._size, self.steps_per_epoch * batch_size, self.steps_per_epoch
        )
        self._examples = replicas.scatter(jax.tree.map(np.asarray, data))

    def prepare(self, carry: Any) -> None:
        """See `Feed`."""
        self._order = self._order_of(self._key, np.uint32(1))
        self._run = _compiled(self._many, carry, self._shared(0, 0), ())

    def _shared(self, first: int, last: int) -> Any:
        return self._examples, self._order, np.int32(first), np.int32(last)

    def begin(self, epoch: int, offset: int) -> None:
        """See `Feed`."""
        self._order = self._order_of(self._key, np.uint32(epoch))
        self._offset = offset

    def run(
        self, carry: Any, limit: int, interrupt: Interrupt, on_interrupt: Callable[[], None]
    ) -> Fed:
        """See `Feed`."""
        first = self._offset
        self._offset = min(first + min(limit, self._steps_a_call), self.steps_per_epoch)
        shared, steps = self._shared(first, self._offset), self._offset - first
        call = self._pool.submit(self._replicas.together, self._run, carry, shared, ())
        _wait(call, interrupt, on_interrupt)
        carry, columns = call.result()
        columns = {name: column[:steps] for name, column in jax.device_get(columns).items()}
        return Fed(carry, columns, steps, self._offset == self.steps_per_epoch)

    def all_batches(self, epoch: int, chunk: int, *, few: bool = False) -> Iterator[Any]:
        """See `Feed`; those examples included that no step of an epoch takes.

        The replicas share each batch, but for a last one of fewer examples than there are replicas.

        Args:
          epoch: Of no account.
          chunk: Examples on each device at once.
          few: Leave out most batches, but none of a shape of its own.
        """
        size, each = self._size, self._replicas.size
        shared = size - size % each
        bounds = [*range(0, shared, chunk * each), shared, *([size] * (shared < size))]
        pieces = list(itertools.pairwise(bounds))
        for low, high in pieces[:2] + pieces[max(2, len(pieces) - 2) :] if few else pieces:
            batch = jax.tree.map(lambda leaf, low=low, high=high: leaf[low:high], self._host)
            yield self._replicas.scatter(batch, own=high <= shared)

    def facts(self) -> dict[str, Any]:
        """See `Feed`."""
        forms = jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", self._host)
        return {"batch_size": self._batch_size, "seed": self._seed, "train_data": str(forms)}

    def close(self) -> None:
        """See `Feed`."""
        self._pool.shutdown(wait=False)


def _wait(
    call: concurrent.futures.Future[Any], interrupt: Interrupt, on_interrupt: Callable[[], None]
) -> None:
    told = interrupt.requested
    while not concurrent.futures.wait([call], timeout=0.1).done:
        if interrupt.requested and not told:
            told = True
            on_interrupt()
