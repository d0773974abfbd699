"""Where the batches of an epoch come from, and the compiled steps that take them."""

import concurrent.futures
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from optperm import checks
from optperm.mapped_axes import mark_varying
from optperm.precision import in_form_of
from optperm.training.interrupt import Interrupt
from optperm.training.programs import Program, agreed
from optperm.training.replicas import AXIS, Replicas

# Far from the step counts that a method may fold into the key of the same seed.
_SHUFFLE_STREAM = 0x5348_5546
# Rows of metrics that a call gives back at least, so that one program serves calls of most lengths.
_ROWS = 1024
_END = object()
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


def shuffled(seed: int, epoch: int | jax.Array, num_examples: int) -> jax.Array:
    """The order in which `fit` goes through examples in memory, int32 (num_examples,).

    A step takes the next `batch_size` of them; those at the end that do not fill a batch are left out.
    The order depends on nothing else than what is given here.

    Args:
      seed: That of `fit`.
      epoch: From 1.
      num_examples: How many there are.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), _SHUFFLE_STREAM)
    return jax.random.permutation(jax.random.fold_in(key, epoch), num_examples)


def stable_step(program: Program, replicas: Replicas, *, own: bool) -> Callable[..., Any]:
    """The program's step, with a carry of the same types after it as before it."""
    axes = (AXIS,) if own and replicas.mesh is not None else ()

    def step(carry: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        new, metrics = program.step(carry, batch)
        checks.check_same_tree(
            "The state after a step", new, carry, source="the state before it", dtypes=False
        )
        return mark_varying((in_form_of(new, carry), metrics), axes)

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
        axes = (AXIS,) if self.own and mapped is not None else ()
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
            return carry, columns

        # Bounds that are arguments: however steps are grouped into calls, one program takes them all,
        # so that a run that was interrupted ends bit for bit like one that was not.
        carry, columns = jax.lax.fori_loop(first, last, body, (carry, columns))
        return carry, agreed(columns)  # once a call, so that steps stay local


@dataclasses.dataclass(frozen=True)
class _OneStep:
    """A step on a batch that is brought."""

    program: Program
    replicas: Replicas
    own: bool

    def __call__(self, carry: Any, _: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
        carry, metrics = stable_step(self.program, self.replicas, own=self.own)(carry, batch)
        return carry, agreed(metrics)


# Kept from one call of `fit` to the next, by what they do and not by which object does it.
@functools.lru_cache(maxsize=32)
def _jitted(function: _ManySteps | _OneStep) -> tuple[Any, dict[Any, Any]]:
    return function.replicas.each(function, own=function.own, donate=True), {}


def _compiled(function: _ManySteps, *arguments: Any) -> Any:
    jitted, known = _jitted(function)
    leaves, structure = jax.tree.flatten(arguments)
    forms = tuple((jax.typeof(leaf), getattr(leaf, "sharding", None)) for leaf in leaves)
    names = ("jax_enable_x64", "jax_default_matmul_precision")
    settings = tuple(getattr(jax.config, name) for name in names)
    key = (structure, forms, settings)
    if key not in known:
        known[key] = jitted.lower(*arguments).compile()
    return known[key]


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
        self._batch_size, self._seed, self._replicas = batch_size, seed, replicas
        self._steps_a_call = min(steps_a_call or self.steps_per_epoch, self.steps_per_epoch)
        rows = min(max(_ROWS, self._steps_a_call), self.steps_per_epoch)
        self._many = _ManySteps(program, replicas, own, rows)
        # A compiled call blocks its thread; one of its own leaves the main one free for Ctrl-C.
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._place_order = replicas.jit(self._dealt)
        self._examples = replicas.scatter(jax.tree.map(np.asarray, data))

    def _dealt(self, epoch: jax.Array) -> jax.Array:
        order = shuffled(self._seed, epoch, self._size)
        shape = (self.steps_per_epoch, self._replicas.size, -1)
        return order[: self.steps_per_epoch * self._batch_size].reshape(shape)

    def prepare(self, carry: Any) -> None:
        """See `Feed`."""
        self._order = self._place_order(np.uint32(1))
        self._run = _compiled(self._many, carry, self._shared(0, 0), ())

    def _shared(self, first: int, last: int) -> Any:
        return self._examples, self._order, np.int32(first), np.int32(last)

    def begin(self, epoch: int, offset: int) -> None:
        """See `Feed`."""
        self._order, self._offset = self._place_order(np.uint32(epoch)), offset

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


class StreamFeed:
    """Batches from an iterable, or from a callable that gives one for each epoch.

    Args:
      source: An iterable, gone through anew in each epoch, or a callable of the epoch's number.
      program: What a step does.
      replicas: Where. Each process brings its own part of a batch, which its devices share.
      own: Whether each replica has a carry of its own.

    Raises:
      TypeError: If the source is neither.
    """

    def __init__(self, source: Any, *, program: Program, replicas: Replicas, own: bool) -> None:
        self._source, self._replicas = source, replicas
        self._step = _jitted(_OneStep(program, replicas, own))[0]
        self._is_used = False
        if callable(source) and not hasattr(source, "__iter__"):
            try:
                inspect.signature(source).bind(1)
            except TypeError as error:
                raise TypeError(
                    "A callable train_data is called with the number of the epoch, from 1, and gives "
                    f"its batches: let it take one argument ({error})."
                ) from error

    def _open(self, epoch: int) -> Iterator[Any]:
        source = self._source
        if not hasattr(source, "__iter__"):
            source = source(epoch)
            if not hasattr(source, "__iter__"):
                raise TypeError(
                    "The train_data of an epoch must be an iterable of batches, got "
                    f"{type(source).__name__}."
                )
            return iter(source)
        iterator = iter(source)
        if iterator is source and self._is_used:
            raise ValueError(
                "train_data can be gone through only once (it is an iterator, such as a generator), "
                "and is needed again. Pass a list, a data loader that begins anew, or a function "
                "that makes a generator: train_data=lambda epoch: batches()."
            )
        self._is_used = True
        return iterator

    def prepare(self, carry: Any) -> None:
        """See `Feed`. Only the first batch tells what to compile."""

    def begin(self, epoch: int, offset: int) -> None:
        """See `Feed`. Batches that were taken before are gone through again, and dropped."""
        self._batches = self._open(epoch)
        for index in range(offset):
            if next(self._batches, _END) is _END:
                raise ValueError(
                    f"train_data ended after {index} batches of epoch {epoch}, but training had taken "
                    f"{offset} of them: to go on exactly, it has to give the same batches again."
                )
        self._next = self._pull()
        if self._next is _END and not offset:
            raise ValueError(
                f"train_data gives no batch in epoch {epoch}. A generator can be gone through only "
                "once: pass a function that makes one, train_data=lambda epoch: batches()."
            )

    def _pull(self) -> Any:
        batch = next(self._batches, _END)
        # All processes take as many steps.
        if self._replicas.any(batch is _END):
            return _END
        return batch

    def _placed(self, batch: Any) -> Any:
        arrays = jax.tree.map(as_array, batch)
        if self._replicas.mesh is None:
            return arrays
        size = num_examples("A batch of train_data", arrays)
        if size % self._replicas.devices:
            raise ValueError(
                f"A batch of train_data must be one that {self._replicas.devices} devices can share, "
                f"got {size} examples. Drop or fill up a last batch that is smaller."
            )
        return self._replicas.scatter_local(arrays)

    def run(
        self, carry: Any, limit: int, interrupt: Interrupt, on_interrupt: Callable[[], None]
    ) -> Fed:
        """See `Feed`."""
        rows: list[dict[str, jax.Array]] = []
        while len(rows) < limit and self._next is not _END and not interrupt.requested:
            carry, row = self._step(carry, (), self._placed(self._next))
            rows.append(row)
            self._next = self._pull()
            if len(rows) > 1:
                # One step is computed while the next batch is loaded, and no more of them pile up.
                self._replicas.together(lambda rows=rows: rows[-2])
        if interrupt.requested:
            on_interrupt()
        host = jax.device_get(rows)
        columns = {
            name: np.stack([row[name] for row in host]) for name in (rows[0] if rows else ())
        }
        return Fed(carry, columns, len(rows), self._next is _END)

    def all_batches(self, epoch: int, chunk: int, *, few: bool = False) -> Iterator[Any]:
        """See `Feed`."""
        del chunk, few
        return (self._placed(batch) for batch in self._open(epoch))

    def facts(self) -> dict[str, Any]:
        """See `Feed`."""
        return {"train_data": "an iterable of batches"}

    def close(self) -> None:
        """See `Feed`."""


def _wait(
    call: concurrent.futures.Future[Any], interrupt: Interrupt, on_interrupt: Callable[[], None]
) -> None:
    told = interrupt.requested
    while not concurrent.futures.wait([call], timeout=0.1).done:
        if interrupt.requested and not told:
            told = True
            on_interrupt()


def is_arrays(data: Any) -> bool:
    """Whether data is a tree of arrays in memory, rather than an iterable of batches."""
    if isinstance(data, jax.Array | np.ndarray | Mapping | tuple):
        leaves = jax.tree.leaves(data)
        return all(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    return False


def num_examples(name: str, data: Any) -> int:
    """The leading axis on which all leaves agree.

    Raises:
      ValueError: If they do not, or there are none.
    """
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(data)]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"{name} must be arrays that agree in their leading axis, which counts examples, got "
            f"shapes {shapes}."
        )
    size = sizes.pop()
    if not size:
        raise ValueError(f"{name} holds no examples: its arrays are of shapes {shapes}.")
    return int(size)


def check_divisible(size: int, replicas: Replicas, name: str) -> None:
    """Raises a ValueError unless all replicas get equally many of so many examples."""
    if size % replicas.size:
        raise ValueError(
            f"{name} counts the examples of all {replicas.size} replicas together, and must be a "
            f"multiple of {replicas.size}, got {size}."
        )


def as_array(leaf: Any) -> Any:
    """The leaf as something that `jax.jit` takes: loaders may yield tensors of other libraries."""
    is_known = isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float)
    return leaf if is_known else np.asarray(leaf)


def check_iterable(name: str, value: Any) -> None:
    """Raises a TypeError unless `value` is arrays, an iterable of batches, or a callable."""
    is_stream = isinstance(value, Iterable) or callable(value)
    if isinstance(value, str | Mapping) or not is_stream:
        raise TypeError(
            f"{name} must be a tree of arrays (a dict or a tuple of NumPy or JAX arrays), an iterable "
            f"of batches, or a function of the epoch's number that gives one, got "
            f"{type(value).__name__}."
        )
