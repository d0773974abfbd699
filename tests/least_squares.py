"""Noisy linear least squares, on which the methods of variance reduction train."""

import jax
import jax.numpy as jnp
import loops
import numpy as np

EXAMPLES, BATCH, RATE = 24, 4, 0.05


def make_data(dtype=np.float32):
    """Draw noisy linear data: no params fit all of it."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 3))
    y = x @ np.arange(1.0, 4.0) + rng.normal(size=EXAMPLES)
    return {"x": x.astype(dtype), "y": y.astype(dtype)}


def start(dtype=np.float32):
    """Params under names that a method may not stumble over: the original SVRG overwrote "full"."""
    return {"full": np.zeros(3, dtype), "bias_full": np.ones((), dtype)}


@jax.jit
def loss_fn(params, batch):
    error = batch["x"] @ params["full"] + params["bias_full"] - batch["y"]
    return jnp.mean(error**2)


def numpy_grad(params, batch):
    """Return the gradient of `loss_fn`, by hand."""
    error = batch["x"] @ params["full"] + params["bias_full"] - batch["y"]
    n = len(error)
    return {"full": 2 * batch["x"].T @ error / n, "bias_full": 2 * np.sum(error) / n}


def part(data, index):
    """Return one of the batches, which come in turns."""
    first = index * BATCH % EXAMPLES
    return {name: values[first : first + BATCH] for name, values in data.items()}


def evaluation(data=None, loss=loss_fn):
    """The gradient of a batch with everything that a method may ask for; `data` are all examples."""
    of_batch = loops.evaluation(loss)

    def evaluate(params, batch):
        grads, extra_args = of_batch(params, batch)
        full_grad_fn = lambda params: of_batch(params, data)[0]  # noqa: E731
        return grads, {"full_grad_fn": full_grad_fn, **extra_args}

    return evaluate


def coins(probability, seed, steps=20):
    """The steps at which a method begins again by chance: the draw is part of what a seed means."""
    key = jax.random.key(seed, impl="threefry2x32")
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(steps))
    drawn = jax.vmap(lambda k: jax.random.bernoulli(k, np.float32(probability)))(keys).tolist()
    assert 3 <= sum(drawn) <= 12
    return drawn
