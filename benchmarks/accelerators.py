"""Memory and traffic of AGN and DiLoCo on TPUs and GPUs, from programs compiled without the devices.

The programs are the steps of four replicas, one on each of four devices, with AdamW as the inner
optimizer and donated params and state. `libtpu` compiles them for TPU v5e (`pip install libtpu`, on
Linux), and `jax-cuda12-plugin` and `jax-cuda12-pjrt` compile them for H100 (`pip install --no-deps`, in
the version of jaxlib; no driver is needed).

    python benchmarks/accelerators.py [--json FILE]
"""

import argparse
import functools
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import accelerator_programs
import jax
import jax.numpy as jnp
import optax
import results
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

AXIS, REPLICAS, SIDE = "replica", 4, 1024
ADAMW = optax.with_extra_args_support(optax.adamw(1e-3))
AGN = functools.partial(optperm.agn, ADAMW, every=10, axis_name=AXIS)
DILOCO = functools.partial(optperm.diloco, ADAMW, every=10, axis_name=AXIS)
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


def main() -> None:
    """Compiles for both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results.add_argument(parser)
    chosen, found = parser.parse_args(), results.Results()
    shape, versions = {AXIS: REPLICAS}, []
    for name, make_mesh, wheel in (
        ("TPU v5e", accelerator_programs.tpu_mesh, "libtpu"),
        ("H100", accelerator_programs.gpu_mesh, "jax-cuda12-pjrt"),
    ):
        measure(f"A step on four {name}", make_mesh(shape), found)
        versions.append(f"{wheel} {importlib.metadata.version(wheel)}")
    found.write(chosen.json, f"any: compiled by {', '.join(versions)}, jax {jax.__version__}")


if __name__ == "__main__":
    main()
