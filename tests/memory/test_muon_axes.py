"""Optax's Muon with the axes of a model's kernels."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from flax import nnx

import optperm
from optperm.memory import muon_axes

LAYERS, DIM = 3, 8


def scanned():
    """Return params of scanned layers, an embedding and a last layer."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    layers = {
        "norm": {"scale": normal(LAYERS, DIM)},
        "up": {"kernel": normal(LAYERS, DIM, 16)},
        "down": {"kernel": normal(LAYERS, 16, DIM)},
    }
    embed = {"embedding": normal(11, DIM)}
    return {"layers": layers, "embed": embed, "lm_head": {"kernel": normal(DIM, 11)}}


def unrolled(tree):
    """Return the same tree, with a subtree for each layer."""
    layers = tree.pop("layers")
    return tree | {str(i): jax.tree.map(lambda leaf: leaf[i], layers) for i in range(LAYERS)}  # noqa: B023


@pytest.mark.usefixtures("lenient")
def test_muon_trains_the_kernels_of_scanned_layers_as_of_unrolled_ones():
    """Each layer is orthogonalized by itself; what is no kernel is trained with Adam."""
    params, updates = scanned(), []
    grads = jax.tree.map(np.asarray, support.random_like(params, 1))
    for tree, grad in ((params, grads), (unrolled({**params}), unrolled({**grads}))):
        axes = muon_axes(tree, lm_head=None)
        tx = optax.contrib.muon(0.1, adam_learning_rate=1.0, muon_weight_dimension_numbers=axes)
        step = jax.jit(lambda g, p, tx=tx: tx.update(g, tx.init(p), p)[0])
        updates.append(jax.tree.map(np.asarray, step(grad, tree)))
    chex.assert_trees_all_close(unrolled(updates[0]), updates[1], rtol=1e-5, atol=1e-6)
    # The first step of Adam moves all entries as far.
    for name, leaf in (("embed", "embedding"), ("lm_head", "kernel")):
        size = np.abs(updates[1][name][leaf])
        np.testing.assert_allclose(size, size[0, 0], rtol=1e-4)
    assert np.abs(updates[1]["0"]["up"]["kernel"]).max() < 0.2


@pytest.mark.exhaustive
@pytest.mark.usefixtures("lenient")
def test_muon_on_a_model_of_nnx_with_states_of_8_bits():
    """Codes store the momentum of the kernels of the scanned layers, and moments of the embedding."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(
                lambda key: nnx.Linear(64, 64, rngs=nnx.Rngs(key)), in_axes=0, out_axes=0
            )
            self.embed = nnx.Embed(16, 64, rngs=rngs)
            self.layers = make(jax.random.split(rngs.params(), LAYERS))

    @nnx.jit
    def step():
        model = Model(nnx.Rngs(0))
        params = nnx.state(model, nnx.Param)
        muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=muon_axes(params))
        optimizer = nnx.Optimizer(model, optperm.quantize_state(muon, min_size=1), wrt=nnx.Param)
        before = nnx.to_pure_dict(params)
        optimizer.update(model, jax.tree.map(jnp.ones_like, params))
        after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), after, before)
        return jax.tree.leaves(moved), jax.tree.leaves(nnx.as_pure(optimizer.opt_state))

    moved, state = step()
    assert min(moved) > 0
    codes = [x.shape for x in state if x.dtype.itemsize == 1]
    assert sorted(codes).count((LAYERS, 64, 64)) == 1


def test_experts_of_unknown_names_are_warned_of():
    params = {"wi": np.ones((8, 64, 256), np.float32), "up": np.ones((4, 4), np.float32)}
    with pytest.warns(UserWarning, match=r"Muon leaves \['wi'\] alone"):
        assert muon_axes(params)["wi"] is None
    with pytest.warns(UserWarning, match=r"leaf_axes leaves \['wi'\] alone.* or None to leave"):
        assert muon_axes(params, up=None) == {"wi": None, "up": None}
    assert muon_axes(params, up=None, wi=None) == {"wi": None, "up": None}
    axes = muon_axes(params, wi=optperm.LeafAxes("kernel", 1, 2, 0))
    assert axes["wi"] == optax.contrib.MuonDimensionNumbers((1,), (2,))
