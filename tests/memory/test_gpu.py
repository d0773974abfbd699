"""What `quantize_state` and `low_rank` compile to on GPUs; skipped without wheels of the CUDA plugin."""

import accelerator_programs
import jax
import jax.numpy as jnp
import loops
import optax
import pytest

import optperm

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("lenient")]
for wheel in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"):
    pytest.importorskip(wheel)


@pytest.mark.parametrize("bits", [8, 4])
def test_an_update_holds_the_moments_of_few_leaves_at_once(bits):
    """The memory holds two moments of two of twelve leaves: one is encoded, the other decoded."""
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(12)}
    tx = optperm.quantize_state(optax.adamw(1e-3), bits=bits)
    mesh, state = accelerator_programs.gpu_mesh({"one": 1}), jax.eval_shape(tx.init, params)
    given = accelerator_programs.shapes((params, state, params), mesh)
    program = accelerator_programs.Program(loops.make_step(tx, apply=loops.by_addition), *given)
    assert program.temp_bytes < 4 * 4 * 512**2


def test_an_update_of_low_rank_copies_no_bases_and_no_moments():
    """It reads the gradient three times, and bases and moments about as often as they are used."""
    params = {
        f"w{i}": {"kernel": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)} for i in range(4)
    }
    tx = optperm.memory.low_rank_adamw(1e-3, rank=1 / 4)
    mesh, state = accelerator_programs.gpu_mesh({"one": 1}), jax.eval_shape(tx.init, params)
    given = accelerator_programs.shapes((params, state, params), mesh)
    program = accelerator_programs.Program(loops.make_step(tx, apply=loops.by_addition), *given)
    # AdamW reads and writes 7 words; in another layout, bases and moments cost 3 words more.
    assert program.work().bytes < 12 * 4 * 4 * 2048**2
