"""What DiLoCo compiles to on GPUs; skipped where the CUDA plugin's wheels are not installed."""

import accelerator_programs
import accelerators
import pytest

import optperm

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("lenient")]
for wheel in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"):
    pytest.importorskip(wheel)

BYTES = 4 * accelerators.SIDE**2


def sent(commit, **options):
    """What the step of four replicas sends, of one leaf."""
    mesh = accelerator_programs.gpu_mesh({accelerators.AXIS: accelerators.REPLICAS})
    case = accelerators.Case(accelerators.DILOCO(**options), commit, leaves=1)
    return [
        (each.operation.removesuffix("-start"), each.bytes, each.is_conditional)
        for each in accelerators.compiled(case, mesh).collectives()
    ]


def test_an_exchange_is_one_collective():
    """Of the params and a weight, within a conditional where steps are counted; or of a few bits."""
    assert sent(None) == [("all-reduce", BYTES + 4, True)]
    assert sent(False) == []
    ((operation, size, _),) = sent(True, compress=optperm.distributed.Compression(bits=4))
    assert operation == "all-gather"
    assert size <= BYTES / 8 + BYTES / 256 + 1024
