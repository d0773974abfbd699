"""What `rigl` compiles to on GPUs; skipped without the wheels of the CUDA plugin."""

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


def test_a_selection_stores_no_codes():
    """Of weights and gradients, which would take 4 bytes for each; masks take 1 byte."""
    params = {
        f"w{i}": {"kernel": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)} for i in range(6)
    }
    tx = optperm.rigl(optax.adam(1e-3), 0.9, end=30, every=5)
    mesh, state = accelerator_programs.gpu_mesh({"one": 1}), jax.eval_shape(tx.init, params)
    given = accelerator_programs.shapes((params, state, params), mesh)
    program = accelerator_programs.Program(loops.make_step(tx, apply=loops.by_addition), *given)
    assert program.temp_bytes < 4 * 6 * 2048**2
