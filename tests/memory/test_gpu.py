"""What `quantize_state` compiles to on GPUs; skipped without the wheels of the CUDA plugin."""

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
