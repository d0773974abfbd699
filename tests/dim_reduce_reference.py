"""The reference's problems: f(x) = x'Ax/2 - b'x + sum(x^4)/80 + noise_t'x, and what it did on them."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optperm

FILE = pathlib.Path(__file__).parent / "data" / "dim_reduce_reference.npz"
CASES = ("quadratic", "stiff", "noisy")


def load(case):
    """The arrays of one case."""
    with np.load(FILE) as arrays:
        prefix = f"{case}/"
        return {name.removeprefix(prefix): arrays[name] for name in arrays if prefix in name}


def split(x):
    """A vector as a tree of two leaves, with its leading axes."""
    cut = x.shape[-1] // 2
    return {"u": x[..., :cut].reshape(*x.shape[:-1], -1, 1), "v": x[..., cut:]}


def join(tree):
    u = tree["u"].reshape(*tree["v"].shape[:-1], -1)
    return jnp.concatenate([u, tree["v"]], axis=-1)


def loss_of(case):
    """The loss of a tree of params with one step's noise for the batch."""

    def loss_fn(params, noise):
        x = join(params)
        quadratic = 0.5 * (x @ (jnp.asarray(case["A"]) @ x)) - jnp.asarray(case["b"]) @ x
        return quadratic + jnp.sum(x**4) / 80 + noise @ x

    return loss_fn


def optimizer(case, **options):
    """What the case was made with; the last number is the rate of the inner SGD."""
    *numbers, tries, rate = case["hyper"]
    options |= dict(zip(("rho", "gamma", "alpha", "sigma"), numbers, strict=True))
    options |= {"n_components": len(case["P"]), "max_search_steps": int(tries)}
    return optperm.dim_reduce(optax.sgd(rate), line_search="mindspore", **options)


def outcome(trail):
    """Params and accepted step length after each step."""
    params = [join(jax.device_get(params)) for params, _ in trail]
    return np.stack(params), np.stack([opt_state.step_length for _, opt_state in trail])
