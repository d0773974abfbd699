"""The networks: how their params are drawn, and that the seed alone decides them."""

import math

import jax
import numpy as np
import pytest
import support
from flax.traverse_util import flatten_dict

from optperm.cli import models
from optperm.cli.errors import UsageError


def spec(**changes):
    fields = {"model": "mlp", "hidden": 64, "input_shape": (8, 8), "num_classes": 10, "seed": 3}
    return models.NetworkSpec(**(fields | changes))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_kernels_and_biases_are_uniform_within_the_kernels_fan_in_bound(model):
    flat = flatten_dict(models.initial_params(spec(model=model, hidden=2000)))
    assert len(flat) == {"mlp": 4, "cnn": 8}[model]
    for (*layer, kind), leaf in flat.items():
        kernel = flat[(*layer, "kernel")]
        bound = math.sqrt(6 / math.prod(kernel.shape[:-1]))
        values = np.asarray(leaf).ravel()
        assert np.abs(values).max() <= bound
        assert len(np.unique(values)) > 0.9 * len(values)
        if values.size >= 1000:
            # The middle and the spread of a uniform distribution on [-bound, bound].
            assert abs(values.mean()) < 0.06 * bound, (layer, kind)
            assert abs(values.std() * math.sqrt(3) / bound - 1) < 0.06, (layer, kind)


def test_the_seed_decides_the_initial_params():
    first, again, other = (models.initial_params(spec(seed=seed)) for seed in (3, 3, 4))
    support.assert_same_bits(first, again)
    for one, another in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
        assert np.any(np.asarray(one) != another)


def test_cnn_takes_images_with_and_without_channels_and_nothing_else():
    for shape in [(8, 8), (5, 7, 3), (1, 1)]:
        of_images = spec(model="cnn", input_shape=shape)
        x = jax.ShapeDtypeStruct((2, *shape), np.float32)
        init = models.build(of_images).init_with_output
        assert jax.eval_shape(init, jax.random.key(0), x)[0].shape == (2, 10)
    with pytest.raises(UsageError, match=r"examples are of shape \[64\]\. Use --model mlp"):
        models.build(spec(model="cnn", input_shape=(64,)))
