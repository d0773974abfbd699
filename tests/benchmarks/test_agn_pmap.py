"""The benchmarks of AGN print what they claim, on four devices of one process and of two."""

import os
import pathlib
import runpy
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import matplotlib.image
import numpy as np
import processes
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import optperm

pytestmark = pytest.mark.programs

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
STEPS, PERIOD = 600, 10
# The network's float32 params: 64 inputs, 128 hidden units, 10 classes.
PARAMS = (64 + 1) * 128 + (128 + 1) * 10


def run(name, *arguments, **options):
    """Runs a benchmark as a user does: a program of its own, with the devices it asks for."""
    environment = os.environ | {
        "PYTHONPATH": str(pathlib.Path(optperm.__file__).parents[1]),
        "XLA_FLAGS": processes.xla_flags(),
    }
    return subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        **options,
    )


@pytest.mark.parametrize(
    "command",
    [
        ("agn_pmap.py", "--seeds", 1),
        pytest.param(("agn_multiprocess.py",), marks=pytest.mark.exhaustive),
    ],
)
def test_a_tenth_of_the_bytes_gives_the_accuracy(command, tmp_path):
    """AGN ends within 0.01 of synchronous training, and sends the params and a count once a period."""
    out = tmp_path / "curves.png"
    ended = run(*command, "--out", out, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    _, _, *rows = ended.stdout.splitlines()  # two lines of heading, and each process 0's row once
    table = {
        method: [float(number) for number in numbers] for method, *numbers in map(str.split, rows)
    }
    assert list(table) == ["synchronous", "AGN", "DiLoCo"]
    accuracy, collectives, bytes_per_step, bytes_in_all, seconds = zip(*table.values(), strict=True)
    assert accuracy[0] > 0.97
    assert accuracy[1] == pytest.approx(accuracy[0], abs=0.01)
    assert accuracy[2] == pytest.approx(accuracy[0], abs=0.01)
    assert collectives == (1, 0.1, 0.1)
    rare = 4 * (PARAMS + 1) / PERIOD
    assert bytes_per_step == (4 * PARAMS, rare, rare)
    assert bytes_in_all == (4 * PARAMS * STEPS, rare * STEPS, rare * STEPS)
    assert min(seconds) > 0
    assert np.std(matplotlib.image.imread(out)) > 0.01
    assert list(tmp_path.iterdir()) == [out]


def test_processes_that_hang_are_ended_and_reported():
    """No training gets as far in a second as to end."""
    began = time.monotonic()
    ended = run("agn_multiprocess.py", "--timeout", 1)
    assert ended.returncode == 1
    assert not ended.stdout
    for index in range(2):
        assert f"Process {index} hung for 1 s" in ended.stderr
    assert time.monotonic() - began < 60


def test_traffic_is_read_from_the_compiled_program():
    """What a conditional guards counts once a period, also where it leads to a further one."""

    def on_replica(params, a, b):
        def commit():
            total = jax.lax.cond(params[1] > 0, lambda: jax.lax.psum(a, "replica"), lambda: a)
            return total, jax.lax.all_gather(b, "replica", tiled=True)

        rare = jax.lax.cond(params[0] > 0, commit, lambda: (a, jnp.tile(b, (4, 1))))
        return jax.lax.psum(params, "replica"), rare

    mesh = Mesh(np.array(jax.devices()[:4]), "replica")
    mapped = jax.shard_map(
        on_replica, mesh=mesh, in_specs=P("replica"), out_specs=P("replica"), check_vma=False
    )
    arguments = jnp.ones(8), jnp.ones((4, 5)), jnp.ones((4, 3), jnp.int8)
    hlo = jax.jit(mapped).lower(*arguments).compile().as_text()
    collectives = runpy.run_path(str(BENCHMARKS / "collectives.py"))
    found = set(map(tuple, collectives["find_collectives"](hlo)))
    assert found == {
        ("all-reduce", 2 * 4, False),
        ("all-reduce", 5 * 4, True),
        ("all-gather", 3 * 1, True),
    }
    assert collectives["traffic"](hlo, 4) == (1 + 2 / 4, 8 + 23 / 4)


def test_what_is_also_reached_without_a_conditional_is_in_every_step():
    """A computation that a branch calls counts as rare only if nothing else calls it."""
    hlo = """
%shared (a: f32[4]) -> f32[4] {
  %a = f32[4] parameter(0)
  ROOT %r = f32[4] all-reduce(%a), to_apply=%add
}

%branch (p: f32[4]) -> f32[4] {
  %p = f32[4] parameter(0)
  ROOT %c = f32[4] call(%p), to_apply=%shared
}

%rare (q: f32[4]) -> f32[4] {
  %q = f32[4] parameter(0)
  ROOT %s = f32[4] all-gather(%q), dimensions={0}
}

ENTRY %main (x: f32[4], i: s32[]) -> f32[4] {
  %x = f32[4] parameter(0)
  %i = s32[] parameter(1)
  %y = f32[4] call(%x), to_apply=%shared
  ROOT %z = f32[4] conditional(%i, %y, %y), branch_computations={%branch, %rare}
}
"""
    found = runpy.run_path(str(BENCHMARKS / "collectives.py"))["find_collectives"](hlo)
    assert list(map(tuple, found)) == [("all-reduce", 16, False), ("all-gather", 16, True)]
