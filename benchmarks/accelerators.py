"""Memory and traffic of methods on TPUs and GPUs, from programs compiled without the devices.

The script prints:

- replicas: the steps of four replicas with AGN and DiLoCo, one on each of four devices, with AdamW as
  the inner optimizer;
- methods: the update of each method on one H100, with 24 matrices of 2,048 x 2,048, 100 million params,
  and their gradients as arguments: kernels, bytes that they read and write in a step that takes no
  branch of a conditional, and temporary memory. Methods for replicas are in the other part; permuting
  weights calls the host, which cannot be compiled without a device.

Params and state are donated. `libtpu` compiles for TPU v5e (`pip install libtpu`, on Linux), and
`jax-cuda12-plugin` and `jax-cuda12-pjrt` compile for H100 (`pip install --no-deps`, in the version of
jaxlib; no driver is needed).

    python benchmarks/accelerators.py [--only replicas|methods] [--methods NAME ...] [--leaves 24]
        [--side 2048] [--json FILE] [--resume]
"""

import argparse
import functools
import importlib.metadata
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import accelerator_programs
import compile as compiling
import jax
import jax.numpy as jnp
import optax
import optax.contrib
import results
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

AXIS, REPLICAS, SIDE = "replica", 4, 1024
ADAMW = optax.with_extra_args_support(optax.adamw(1e-3))
AGN = functools.partial(optperm.agn, ADAMW, every=10, axis_name=AXIS)
NESTEROV = optax.sgd(0.8, momentum=0.5, nesterov=True)
DILOCO = functools.partial(optperm.diloco, ADAMW, NESTEROV, every=10, axis_name=AXIS)
TOP_K = optperm.distributed.Compression(1 / 32, bits=2)


class Case(NamedTuple):
    """A step: its optimizer, its flag, and the number of its square leaves."""

    tx: Any
    commit: bool | None = None
    leaves: int = 4


CASES = {
    "AdamW alone": Case(ADAMW),
    "`agn`, counted": Case(AGN()),
    "`diloco`, counted": Case(DILOCO()),
    "`diloco`, `commit=False`": Case(DILOCO(), commit=False),
    '`diloco(combine="pairs")`, counted': Case(DILOCO(combine="pairs")),
    '`agn(combine="sequential")`, `commit=True`': Case(AGN(combine="sequential"), True, 1),
    "`Compression(bits=4)`, `commit=True`": Case(
        DILOCO(compress=optperm.distributed.Compression(bits=4)), True, 1
    ),
    "`Compression(bits=1)`, `commit=True`": Case(
        DILOCO(compress=optperm.distributed.Compression(bits=1)), True, 1
    ),
    "`Compression(1 / 32, bits=2)`, `commit=True`": Case(DILOCO(compress=TOP_K), True, 1),
}


def square_leaves(number: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a number of float32 leaves."""
    return {f"w{i}": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32) for i in range(number)}


def make_step(tx: Any, commit: Any = None) -> Callable[..., Any]:
    """A whole step: update and applied updates."""

    def step(params: Any, opt_state: Any, grads: Any) -> Any:
        updates, opt_state = tx.update(grads, opt_state, params, commit=commit)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    return step


def compiled(case: Case, mesh: Mesh | None = None) -> accelerator_programs.Program:
    """The step of four replicas, one on each device: of four v5e, or of a mesh."""
    params = square_leaves(case.leaves)
    trees = params, jax.eval_shape(case.tx.init, params), params
    mesh = mesh or accelerator_programs.tpu_mesh({AXIS: REPLICAS})
    given = [accelerator_programs.stacked(tree, mesh, AXIS) for tree in trees]
    block = jax.vmap(make_step(case.tx, case.commit))
    mapped = jax.shard_map(block, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
    return accelerator_programs.Program(mapped, *given)


def measure(title: str, mesh: Mesh, found: results.Results) -> None:
    """Compiles all steps for a mesh, and prints what they need."""
    print(title)
    for name, case in CASES.items():
        program, size = compiled(case, mesh), case.leaves * SIDE**2
        sent = program.collectives()
        operations = sorted({each.operation.removesuffix("-start") for each in sent})
        # A switch has a branch for each way to pair the replicas; an exchange takes one branch.
        is_paired = "collective-permute" in operations
        each = sum(each.bytes for each in sent) / (REPLICAS // 2 if is_paired else 1) / size
        where = " in a conditional" if sent and all(each.is_conditional for each in sent) else ""
        cells = {
            "leaves": case.leaves,
            "temporary_memory,_of_the_params": f"{program.temp_bytes / (4 * size):.2f}",
            "not_written_in_place,_bytes": program.not_donated,
            "sent,_bytes_per_param": f"{each:.2f}" if sent else "nothing",
            "by": ", ".join(operations) + where,
        }
        found.row(title, step=name, **cells)
        print(f"{name:48}", *(f"{cell!s:>8}" for cell in cells.values()))


ADAMW_ALONE = "optax.adamw"
BFLOAT16 = ("widen_params", "widen_params, quantize_state")
# What takes a step of a method on one device. Permuting weights calls the host.
METHODS: dict[str, Callable[[], Any]] = {
    ADAMW_ALONE: lambda: optax.adamw(1e-3),
    "optax.contrib.muon": lambda: optax.contrib.muon(1e-3),
    "quantize_state, Muon": lambda: optperm.quantize_state(optax.contrib.muon(1e-3)),
    "widen_params": lambda: optperm.widen_params(optax.adamw(1e-3)),
    "widen_params, quantize_state": lambda: optperm.widen_params(
        optperm.quantize_state(optax.adamw(1e-3))
    ),
}
METHODS |= {
    name: make
    for name, make in compiling.METHODS.items()
    if not name.startswith(("agn", "diloco", "sgperm", "permute", "mandt", compiling.ADAM))
}


def inner_product(params: Any, grads: Any) -> jax.Array:
    """Return a loss whose gradient is the second argument."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True)
    return sum((jnp.vdot(p, g) for p, g in pairs), start=jnp.zeros([]))


def measure_methods(
    names: Sequence[str], leaves: int, side: int, found: results.Results, path: Any
) -> None:
    """Compile the update of each method for an H100, and print its kernels, bytes and memory."""
    mesh, size = accelerator_programs.gpu_mesh({"one": 1}), leaves * side**2
    title = f"An update of {size / 1e6:.0f} million params on one H100"
    for name in [ADAMW_ALONE, *(name for name in names if name != ADAMW_ALONE)]:
        if found.has(title, method=f"`{name}`"):
            continue
        dtype = jnp.bfloat16 if name in BFLOAT16 else jnp.float32
        shape = jax.ShapeDtypeStruct((side, side), dtype)
        params = {f"w{index:02}": {"kernel": shape} for index in range(leaves)}
        tx = METHODS[name]()
        step = compiling.make_step(name, tx, inner_product)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of hyperparameters that do not matter here
            given = params, jax.eval_shape(tx.init, params), params
            program = accelerator_programs.Program(step, *accelerator_programs.shapes(given, mesh))
        work = program.work()
        found.show(
            title,
            method=f"`{name}`",
            kernels=work.kernels,
            bytes_per_param=f"{work.bytes / size:.1f}",
            temporary_bytes_per_param=f"{program.temp_bytes / size:.2f}",
        )
        found.write(path, _versions("jax-cuda12-pjrt"))


def _versions(*wheels: str) -> str:
    """Return what compiled the programs."""
    versions = ", ".join(f"{wheel} {importlib.metadata.version(wheel)}" for wheel in wheels)
    return f"any: compiled by {versions}, jax {jax.__version__}"


def main() -> None:
    """Compile what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=("replicas", "methods"), default="replicas")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--leaves", type=int, default=24)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--resume", action="store_true", help="keep the rows in the file of --json")
    results.add_argument(parser)
    chosen, found = parser.parse_args(), results.Results()
    if chosen.resume:
        found.resume(chosen.json)
    if chosen.only == "methods":
        measure_methods(chosen.methods, chosen.leaves, chosen.side, found, chosen.json)
        return
    shape = {AXIS: REPLICAS}
    measure("A step on four TPU v5e", accelerator_programs.tpu_mesh(shape), found)
    measure("A step on four H100", accelerator_programs.gpu_mesh(shape), found)
    found.write(chosen.json, _versions("libtpu", "jax-cuda12-pjrt"))


if __name__ == "__main__":
    main()
