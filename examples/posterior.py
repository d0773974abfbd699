"""Constant SGD as a sampler: the posterior of a logistic regression, without any tuning."""

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_breast_cancer

import optperm

names = load_breast_cancer().feature_names[:8]
x, y = load_breast_cancer(return_X_y=True)
x = np.float32((x - x.mean(0)) / x.std(0))[:, :8]
data = {"x": x, "sign": np.float32(2 * y - 1)}


def loss_fn(params, batch):
    """Return the mean of -log p(y | x, w)."""
    logits = batch["x"] @ params["w"] + params["intercept"]
    return jnp.mean(jax.nn.softplus(-batch["sign"] * logits))


def log_prior(params):
    """Return the log of a normal prior, up to a constant."""
    return -0.5 * (jnp.sum(params["w"] ** 2) + params["intercept"] ** 2)


params = {"w": jnp.zeros(8), "intercept": jnp.zeros([])}
key = jax.random.key(0)
samples = optperm.bayes.sample(loss_fn, data, params, key, log_prior=log_prior)
w = np.asarray(samples.params["w"])  # (chains, draws, 8)
for name, mean, sd in zip(names, w.mean((0, 1)), w.std((0, 1)), strict=True):
    print(f"{name:22} {mean:6.2f} ± {sd:.2f}")
