"""What `quantize_state` compiles to on GPUs; skipped without the wheels of the CUDA plugin."""

import accelerator_programs
import jax
import jax.numpy as jnp
import optax
import pytest

import optperm

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("lenient")]
for wheel in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12"):
    pytest.importorskip(wheel)

SIDE, LEAVES = 512, 12


@pytest.mark.parametrize("bits", [8, 4])
def test_an_update_holds_the_moments_of_few_leaves_at_once(bits):
    """Two moments of two of twelve leaves, of which one is encoded while the other is decoded."""
    params = {f"w{i}": jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32) for i in range(LEAVES)}
    tx = optperm.quantize_state(optax.adamw(1e-3), bits=bits)
    state = jax.eval_shape(tx.init, params)

    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mesh = accelerator_programs.gpu_mesh({"one": 1})
    given = accelerator_programs.shapes((params, state, params), mesh)
    program = accelerator_programs.Program(step, *given)
    assert program.temp_bytes < 4 * 4 * SIDE**2
