"""What samplers compile to on a TPU; skipped where `libtpu` is not installed."""

import accelerator_programs
import jax
import jax.numpy as jnp
import optax
import pytest

import optperm

pytestmark = [pytest.mark.programs, pytest.mark.usefixtures("lenient")]
pytest.importorskip("libtpu")

PARAMS = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
BYTES = 4 * 1024**2


def program(tx):
    """A step on a batch of 64."""

    def step(params, opt_state, x):
        e = optperm.evaluate(lambda w, x: jnp.mean((x @ w - x) ** 2), params, x)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optax.apply_updates(params, updates), opt_state

    mesh = accelerator_programs.tpu_mesh({"one": 1}, "v5e:1x1")
    x = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    given = accelerator_programs.shapes((PARAMS, jax.eval_shape(tx.init, PARAMS), x), mesh)
    return accelerator_programs.Program(step, *given)


def test_gradients_of_few_examples_are_held_at_once():
    """The default microbatch needs less memory than 64 gradients, which are 64 times the params."""
    assert program(optperm.constant_sgd(10_000, 64)).temp_bytes < 3 * BYTES


def test_noise_is_not_fused_with_the_product_that_makes_the_gradient():
    """There it would be unrolled into each tile: a minute of compiling, and megabytes of code."""
    for tx in (optperm.sgld(1e-6, 10_000), optperm.sghmc(1e-6, 10_000, 0.1)):
        assert program(tx).code_bytes < 4e6  # 5.5e6 fused
