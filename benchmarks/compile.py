"""Seconds to trace and to compile a training step of each method, over those of `optax.adam`.

A step evaluates a loss, updates and applies the updates. Half of the leaves are matrices, the others
vectors: all matrices of one shape and all vectors of one shape, or of four shapes each. The seconds are
of the processor. The seconds from the cache are those of tracing and of reading the program from JAX's
persistent cache. The lines are those of the program before and after XLA has optimized it.

    python benchmarks/compile.py [--only rigl svrg ...] [--leaves 16,64,256] [--json FILE [--resume]]

Parts of the table may be measured by several processes, each with the methods of its `--only` and a file
of its own; each measures `optax.adam` too. The parts make one table by

    python benchmarks/compile.py --parts FILE FILE ... --json FILE
"""

import argparse
import contextlib
import itertools
import pathlib
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import results
import timing
from jax.experimental.compilation_cache import compilation_cache

import optperm

AXIS, REPLICAS = "replica", 2
ADAM = "optax.adam"
SIDES = {2: ((32, 32),), 8: ((32, 32), (32, 48), (48, 24), (24, 64))}
RAMP = optax.linear_schedule(0.0, 1.0, 30)
WITH_CENTER = {"axis_name": AXIS}


def followed(tx: Any) -> Any:
    """A transformation of gradients with an optimizer after it."""
    return optax.chain(tx, optax.sgd(0.1))


# By name what builds it.
METHODS: dict[str, Callable[[], Any]] = {
    ADAM: lambda: optax.adam(1e-3),
    "sgperm": lambda: optperm.sgperm(num_steps=100),
    "permute_by_cycles": lambda: optperm.permute_by_cycles(0.1, 0.5),
    "laperm": lambda: optperm.laperm(optax.adam(1e-3), 10),
    "agn": lambda: optperm.agn(optax.adam(1e-3), every=5, **WITH_CENTER),
    "agn, sequential": lambda: optperm.agn(
        optax.adam(1e-3), every=5, combine="sequential", **WITH_CENTER
    ),
    "diloco": lambda: optperm.diloco(optax.adam(1e-3), every=5, **WITH_CENTER),
    "diloco, 4 bits": lambda: optperm.diloco(
        optax.adam(1e-3),
        every=optperm.distributed.Every(8, 4, 1),
        compress=optperm.distributed.Compression(bits=4),
        **WITH_CENTER,
    ),
    "diloco, 1/16 of the entries": lambda: optperm.diloco(
        optax.adam(1e-3),
        every=5,
        compress=optperm.distributed.Compression(1 / 16),
        **WITH_CENTER,
    ),
    "record_trajectory": lambda: optax.chain(
        optax.sgd(0.1), optperm.record_trajectory(every=2, num_snapshots=6)
    ),
    "dim_reduce": lambda: optperm.dim_reduce(n_components=4),
    "dldr": lambda: optperm.dldr(
        optax.sgd(0.1), optperm.dim_reduce(n_components=4), every=2, num_snapshots=6
    ),
    "project": lambda: optperm.project(optax.sgd(0.1), n_components=4),
    "twa": lambda: optperm.twa(optax.sgd(0.1), n_components=4),
    "low_rank": lambda: optperm.low_rank(optax.scale_by_adam(), 1 / 4),
    "low_rank, svd": lambda: optperm.low_rank(optax.scale_by_adam(), 1 / 4, projection="svd"),
    "apollo": lambda: optperm.apollo(rank=1 / 4),
    "quantize_state": lambda: optperm.quantize_state(optax.adam(1e-3), min_size=1),
    "quantize_state, 4 bits": lambda: optperm.quantize_state(optax.adam(1e-3), bits=4, min_size=1),
    "svrg": lambda: followed(optperm.svrg(every=10)),
    "svrg, loopless": lambda: followed(optperm.svrg(probability=0.1)),
    "katyusha": lambda: optperm.katyusha(0.01, 0.1, probability=0.1),
    "recursive_gradient": lambda: followed(optperm.recursive_gradient(0.1, every=10)),
    "mars": lambda: optax.chain(optperm.mars(), optax.adam(1e-3)),
    "proximal": lambda: optax.chain(optax.sgd(0.1), optperm.proximal(0.1, l1=0.01)),
    "mandt_sgd": lambda: optperm.mandt_sgd(1000, 8),
    "sgld": lambda: optperm.sgld(1e-5, 1000),
    "sghmc": lambda: optperm.sghmc(1e-5, 1000, 0.1),
    "ivon": lambda: optperm.ivon(0.1, 1000),
    "swag": lambda: optax.chain(optax.sgd(0.1), optperm.swag(every=3, rank=4)),
    "mask_elements": lambda: optax.chain(optax.adam(1e-3), optperm.mask_elements()),
    "prune_gradually": lambda: optperm.prune_gradually(optax.adam(1e-3), 0.9, RAMP, every=5),
    "prune_gradually, movement": lambda: optperm.prune_gradually(
        optax.adam(1e-3), 0.9, RAMP, every=5, criterion="movement"
    ),
    "rigl": lambda: optperm.rigl(optax.adam(1e-3), 0.9, end=30, every=5),
    "rigl, random": lambda: optperm.rigl(optax.adam(1e-3), 0.9, end=30, every=5, grow="random"),
    "switch_after": lambda: optperm.switch_after(3, optax.sgd(0.1), optax.adam(1e-3)),
}


# The preconditioner of constant SGD, whose kernel is learned for the params.
KERNELS: dict[str, Any] = {"constant_sgd, diagonal": "diagonal", "constant_sgd, scalar": "scalar"}


class Cost(NamedTuple):
    """Seconds of the processor, or on the wall, and lines a leaf."""

    trace: float
    compile: float
    cached: float
    wall: float
    lines: float
    optimized_lines: float


def make_params(num_leaves: int, num_shapes: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes of pairs of a matrix and a vector."""
    sides, params = SIDES[num_shapes], {}
    for index in range(num_leaves // 2):
        rows, columns = sides[index % len(sides)]
        params[f"w{index:03}"] = jax.ShapeDtypeStruct((rows, columns), jnp.float32)
        params[f"b{index:03}"] = jax.ShapeDtypeStruct((columns,), jnp.float32)
    return params


def loss_fn(params: Any, batch: Any) -> jax.Array:
    """The mean of squared distances."""
    (targets,) = batch
    return sum(jnp.mean((leaf - targets[0, 0]) ** 2) for leaf in jax.tree.leaves(params))


def make_step(name: str, tx: Any, loss_fn: Callable[..., Any] = loss_fn) -> Callable[..., Any]:
    """A training step with what the method needs."""
    tx = optax.with_extra_args_support(tx)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        evaluation = optperm.evaluate(loss_fn, params, batch)
        extra_args = dict(evaluation.extra_args)
        if name.startswith(("svrg", "katyusha", "recursive")):
            extra_args["full_grad_fn"] = jax.grad(lambda params: loss_fn(params, batch))
        if name == "ivon":
            extra_args["draw"] = jax.tree.map(lambda p: p + 0.1, params)
        updates, opt_state = tx.update(evaluation.grad, opt_state, params, **extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    return step


def make_constant_sgd(preconditioner: Any, params: Any) -> Any:
    """Constant SGD with a kernel that was learned in a few steps, whose numbers do not matter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kernel, _ = optperm.bayes.learn_kernel(
            loss_fn,
            (jax.random.normal(jax.random.key(0), (1000, 2)),),
            jax.tree.map(lambda p: jnp.ones(p.shape, p.dtype), params),
            key=0,
            batch_size=8,
            preconditioner=preconditioner,
            steps=16,
        )
    return optperm.constant_sgd(kernel)


def make_program(name: str, num_leaves: int, num_shapes: int) -> tuple[Any, tuple[Any, ...]]:
    """A step that is not traced yet, and the shapes of its arguments."""
    params = make_params(num_leaves, num_shapes)
    is_given = name in KERNELS
    tx = make_constant_sgd(KERNELS[name], params) if is_given else METHODS[name]()
    step, init = make_step(name, tx), tx.init
    batch = (jax.ShapeDtypeStruct((8, 2), jnp.float32),)
    if name.startswith(("agn", "diloco")):
        # A row of the leading axis is a replica.
        step = jax.vmap(step, (0, 0, None), axis_name=AXIS)
        init = jax.vmap(init, axis_name=AXIS)
        params = {k: jax.ShapeDtypeStruct((REPLICAS, *p.shape), p.dtype) for k, p in params.items()}
    return jax.jit(step), (params, jax.eval_shape(init, params), batch)


@timing.undisturbed()
def measure(name: str, num_leaves: int, num_shapes: int) -> Cost:
    """Trace and compile a step twice: the second time the program is in the cache."""
    found = []
    for _ in range(2):
        # Functions that were traced inside another step are traced again.
        jax.clear_caches()
        program, arguments = make_program(name, num_leaves, num_shapes)
        wall, start = time.perf_counter(), time.process_time()
        lowered = program.lower(*arguments)
        traced = time.process_time()
        compiled = lowered.compile()
        found.append((traced - start, time.process_time() - traced, time.perf_counter() - wall))
    texts = lowered.as_text(), compiled.as_text()
    lines = [text.count("\n") / num_leaves for text in texts]
    (trace, cold, wall), again = found
    return Cost(trace, cold, again[0] + again[1], wall, *lines)


@contextlib.contextmanager
def empty_cache() -> Iterator[None]:
    """Let JAX keep every program in a folder that is empty at first."""
    wanted = {
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    with tempfile.TemporaryDirectory() as folder:
        wanted["jax_compilation_cache_dir"] = folder
        before = {key: getattr(jax.config, key) for key in wanted}
        try:
            for key, value in wanted.items():
                jax.config.update(key, value)
            compilation_cache.reset_cache()
            yield
        finally:
            for key, value in before.items():
                jax.config.update(key, value)
            compilation_cache.reset_cache()


def find_title(num_shapes: int) -> str:
    """The title of a table."""
    return f"Leaves of {num_shapes} shapes: seconds"


def table(
    num_shapes: int,
    names: list[str],
    sizes: list[int],
    found: results.Results,
    path: pathlib.Path | None,
) -> None:
    """Measure all methods without a row for this number of shapes; print and write the rows."""
    costs: dict[tuple[str, int], Cost] = {}
    title = find_title(num_shapes)
    for name in names:
        has_row = found.has(title, method=f"`{name}`")
        if has_row and name != ADAM:
            continue
        cells: dict[str, str] = {}
        for size in sizes:
            costs[name, size] = cost = measure(name, size, num_shapes)
            adam = costs[ADAM, size]
            ratio = (cost.trace + cost.compile) / (adam.trace + adam.compile)
            cells[f"{size}_leaves,_over_Adam"] = f"{ratio:.1f}"
            cells[f"{size}:_trace"] = f"{cost.trace:.2f}"
            cells[f"{size}:_compile"] = f"{cost.compile:.2f}"
            cells[f"{size}:_wall"] = f"{cost.wall:.2f}"
            cells[f"{size}:_cached"] = f"{cost.cached:.2f}"
            cells[f"{size}:_lines_a_leaf"] = f"{cost.lines:.0f}, {cost.optimized_lines:.0f}"
        for small, large in itertools.pairwise(sizes):
            few, many = costs[name, small], costs[name, large]
            growth = (many.trace + many.compile) / (few.trace + few.compile)
            cells[f"{large}_over_{small}"] = f"{growth:.1f}"
        if not has_row:
            found.row(title, method=f"`{name}`", **cells)
        found.write(path)
        print(f"{num_shapes} shapes  {name:28}", *cells.values(), sep="  ", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", choices=[*METHODS, *KERNELS], metavar="NAME", default=[*METHODS]
    )
    parser.add_argument("--leaves", default="16,64,256", help="numbers of leaves")
    parser.add_argument("--shapes", type=int, nargs="+", choices=[*SIDES], default=[*SIDES])
    parser.add_argument("--resume", action="store_true", help="keep the rows in the file of --json")
    parser.add_argument("--parts", type=pathlib.Path, nargs="+", help="files to make one table of")
    results.add_argument(parser)
    options = parser.parse_args()
    if options.parts:
        order = [f"`{name}`" for name in METHODS]
        results.join(options.parts, options.json, {find_title(number): order for number in SIDES})
        return
    names = [ADAM, *(name for name in options.only if name != ADAM)]
    sizes, found = [int(size) for size in options.leaves.split(",")], results.Results()
    if options.resume:
        found.resume(options.json)
    with empty_cache():
        # The first program of a process pays for what JAX loads.
        measure(ADAM, 2, 2)
        for num_shapes in options.shapes:
            table(num_shapes, names, sizes, found, options.json)


if __name__ == "__main__":
    main()
