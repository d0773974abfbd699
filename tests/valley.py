"""A quadratic with its minimum at the mean of the batch, on which subspace methods train."""

import jax
import jax.numpy as jnp
import loops
import numpy as np

SCALES = np.float32([1.0, 3.0, 10.0, 30.0, 100.0, 300.0])


@jax.jit
def loss_fn(params, batch):
    """Half the scaled squared distance from each example, averaged."""
    x = jnp.concatenate([params["a"].ravel(), params["b"][None]])
    return 0.5 * jnp.mean(jnp.sum(SCALES * (x - batch) ** 2, axis=-1))


evaluate = loops.evaluation(loss_fn)


def start():
    """Six zeros in two leaves."""
    return {"a": np.zeros((5, 1), np.float32), "b": np.float32(0.0)}


def rows(k, seed=0):
    """Orthonormal rows over the params."""
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(6, 6)))[0][:k].astype(np.float32)
    return {"a": q[:, :5].reshape(k, 5, 1), "b": q[:, 5]}


def flat(tree):
    """Stacked trees, such as rows, as a matrix."""
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(len(leaf), -1) for leaf in leaves], axis=1)


def batches(steps, size=1, seed=0):
    """For each step two examples for each of `size` replicas."""
    rng = np.random.default_rng(seed)
    return 1 + 0.3 * rng.normal(size=(steps, size, 2, 6)).astype(np.float32)
