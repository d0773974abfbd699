"""Kernels of constant SGD that are made, not learned, for params of any structure."""

import jax
import jax.numpy as jnp
import optax

import optperm


def kernel_for(params, form="diagonal", *, num_data=1000, batch_size=2, momentum=0.5):
    """Return a kernel with a noise of 1 and a curvature of 2 in each direction."""
    kernel = optperm.bayes.NoiseKernel.unknown(params, form, control_variates=False)
    noise = jax.tree.map(jnp.ones_like, kernel.noise)
    return kernel._replace(
        noise=noise,
        curvature=jax.tree.map(lambda c: 2 * c, noise),
        max_stability=jnp.float32(0.2),
        num_data=jnp.int32(num_data),
        batch_size=jnp.int32(batch_size),
        momentum=jnp.float32(momentum),
    )


def constant_sgd(
    form: str = "diagonal",
    *,
    num_data: int = 1000,
    batch_size: int = 2,
    temperature: optax.ScalarOrSchedule = 1.0,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    key: int | jax.Array = 0,
):
    """Return constant SGD that samples with the kernel for the params that it gets."""
    options = {"temperature": temperature, "learning_rate": learning_rate, "key": key}
    numbers = {"num_data": num_data, "batch_size": batch_size}

    def init(params):
        kernel = kernel_for(params, form, **numbers)
        return optperm.constant_sgd(kernel, **options).init(params)

    # A step needs only the kernel in the state
    update = optperm.constant_sgd(kernel_for(jnp.zeros(1), form, **numbers), **options).update
    return optax.GradientTransformationExtraArgs(init, update)
