"""Sparse matrices and networks without dead units: the same outputs."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support

import optperm
from optperm.sparsity import remove_units, to_sparse

pytestmark = pytest.mark.usefixtures("lenient")
GROUPS = {
    "first": [("a/kernel", -1), ("a/bias", -1), ("b/kernel", -2)],
    "second": [("b/kernel", -1), ("b/bias", -1), ("c/kernel", -2)],
}


@pytest.mark.parametrize("format", ["bcsr", "bcoo", "scipy"])
def test_sparse_matrix_of_each_format_has_the_entries_and_products_of_the_dense_one(format):
    """Store neither 0.0 nor -0.0, keep the dtype, and leave other leaves as they were."""
    w = np.array(support.normal((5, 4)))
    w[[0, 2, 4]] = -0.0
    w = jax.device_put(w)
    params = {"bias": np.ones(4, np.float32), "conv": np.ones((2, 2, 1, 1), np.float32)}
    params = {"w": w, **jax.device_put(params), "kept": w}
    got = to_sparse(params, format, include=lambda p: {n: n != "kept" for n in p})
    assert (got["w"].nnz if format == "scipy" else got["w"].nse) == 8
    dense = got["w"].toarray() if format == "scipy" else got["w"].todense()
    support.assert_same_bits(np.asarray(dense) + 0.0, np.asarray(w).T + 0.0)
    x = np.float32(support.normal((3, 5), 1))
    np.testing.assert_allclose(
        np.asarray(got["w"] @ x.T).T, x @ np.asarray(w), rtol=1e-5, atol=1e-6
    )
    assert all(got[name] is params[name] for name in ("bias", "conv", "kept"))


def outputs(params, x):
    params = jax.tree.map(np.asarray, params)
    hidden = np.maximum(x @ params["a"]["kernel"] + params["a"]["bias"], 0)
    hidden = np.maximum(hidden @ params["b"]["kernel"] + params["b"]["bias"], 0)
    return hidden @ params["c"]["kernel"]


def network():
    sizes = {"a": (6, 5), "b": (5, 4), "c": (4, 3)}
    return {
        name: {"kernel": support.normal(shape, i), "bias": support.normal(shape[1:], 9 + i)}
        for i, (name, shape) in enumerate(sizes.items())
    }


def test_units_that_contribute_nothing_are_removed():
    """Look at what leaves units, at what enters them where 0 stays 0, and again after each removal."""
    params = jax.tree.map(np.array, network())
    # Unit 1 of the second layer leads nowhere; unit 2 of the first leads to that one alone.
    params["c"]["kernel"][1] = 0.0
    params["b"]["kernel"][2] = 0.0
    params["b"]["kernel"][2, 1] = 3.0
    # Nothing enters unit 4 of the first, nor unit 0, which has a bias.
    params["a"]["kernel"][:, [0, 4]] = 0.0
    params["a"]["bias"][4] = 0.0
    params, x = jax.device_put(params), np.asarray(support.normal((7, 6), 20))
    for options, first in (({}, 4), ({"zero_at_zero": True}, 3)):
        small = remove_units(params, GROUPS, **options)
        shapes = [small[name]["kernel"].shape for name in "abc"]
        assert shapes == [(6, first), (first, 3), (3, 3)]
        assert small["a"]["bias"].shape == (first,)
        np.testing.assert_allclose(outputs(small, x), outputs(params, x), rtol=1e-4, atol=1e-5)
    same = remove_units(network(), GROUPS, zero_at_zero=True)
    support.assert_same_bits(same, network())
    # Where nothing leaves a layer, all before it goes too, and the outputs are the last biases.
    params["c"]["kernel"] = np.zeros_like(params["c"]["kernel"])
    small = remove_units(params, GROUPS)
    assert [small[name]["kernel"].shape for name in "abc"] == [(6, 0), (0, 0), (0, 3)]
    np.testing.assert_array_equal(outputs(small, x), outputs(params, x))


def test_weights_of_other_layouts_lose_the_same_units():
    """Have the shapes (out, in) as in Equinox, (in, heads, dim), and a vector of one value a head.

    Only the vector has to name its side, since its single axis looks like the outputs of a bias.
    """
    shapes = {"a": (5, 6), "q": (5, 4, 2), "v": (4,), "o": (4, 2, 3)}
    params = {n: np.array(support.normal(shape, i)) for i, (n, shape) in enumerate(shapes.items())}
    # Nothing reads unit 1 of the first layer. Neither the value nor the output reads head 2, and the
    # output alone reads head 3.
    params["q"][1], params["v"][2:], params["o"][2] = 0.0, 0.0, 0.0
    params = jax.device_put(params) | {"key": jax.random.key(0)}

    def outputs(params, x):
        a, q, v, o = (np.asarray(params[name]) for name in "aqvo")
        heads = np.einsum("bi,ihd->bhd", np.maximum(x @ a.T, 0), q)
        return np.sum(heads, axis=-1) @ v, np.einsum("bhd,hdo->bo", heads, o)

    groups = {"hidden": [("a", 0), ("q", 0)], "heads": [("q", 1), ("v", 0, "out"), ("o", 0)]}
    axes = optperm.leaf_axes(
        params,
        a=optperm.LeafAxes("kernel", 1, 0),
        q=optperm.LeafAxes("kernel", 0, (1, 2)),
        o=optperm.LeafAxes("kernel", (0, 1), 2),
    )
    small = remove_units(params, groups, axes=axes)
    assert [small[n].shape for n in "aqvo"] == [(4, 6), (4, 3, 2), (3,), (3, 2, 3)]
    assert small["key"] is params["key"]
    x = np.asarray(support.normal((7, 6), 9))
    for got, wanted in zip(outputs(small, x), outputs(params, x), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_units_of_a_stack_are_removed_where_no_layer_uses_them():
    """Remove what no layer uses, layer by layer, and say which units some layers do not use."""
    up, down = np.array(support.normal((3, 4, 5))), np.array(support.normal((5, 3, 4), 1))
    # Unit 0 leads nowhere; nothing enters unit 1 in the first two layers, and it leads nowhere in the
    # third; unit 2 leads nowhere in the first layer alone.
    down[0], up[:2, :, 1], down[1, 2], down[2, 0] = 0.0, 0.0, 0.0, 0.0
    layers = {
        "first": {"norm": {"scale": np.ones((3, 4), np.float32)}, "up": {"kernel": up}},
        "down": {"kernel": down},
    }
    layers = jax.device_put(layers)
    axes = optperm.leaf_axes(layers, down=optperm.LeafAxes("kernel", 0, 2, 1))
    groups = {"hidden": [("first/up/kernel", -1), ("down/kernel", 0)]}
    with pytest.warns(UserWarning, match=r"^1 units of groups\['hidden'\] .* some of the 3 layers"):
        small = remove_units(layers, groups, zero_at_zero=True, axes=axes)
    assert small["first"]["up"]["kernel"].shape == (3, 4, 3)

    def outputs(layers, x):
        up, down = layers["first"]["up"]["kernel"], layers["down"]["kernel"]
        hidden = np.maximum(np.einsum("bi,lio->blo", x, np.asarray(up)), 0)
        return np.einsum("blo,olj->blj", hidden, np.asarray(down))

    x = np.asarray(support.normal((7, 4), 2))
    np.testing.assert_allclose(outputs(small, x), outputs(layers, x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"axis 0 of 'first/up/kernel' .* neither an input nor"):
        remove_units(layers, {"layers": [("first/up/kernel", 0), ("down/kernel", 1)]}, axes=axes)


def test_only_a_kernel_that_is_a_matrix_becomes_sparse():
    """Take the outputs as rows in each layout; leave stacks, windows and embeddings as they are."""
    model = eqx.nn.MLP(4, 7, 5, 0, key=jax.random.key(0))
    got = to_sparse(eqx.filter(model, eqx.is_inexact_array))
    for layer, of_model in zip(got.layers, model.layers, strict=True):
        support.assert_same_bits(layer.weight.todense(), of_model.weight)
    shapes = {"up": {"kernel": (3, 4, 5)}, "norm": {"scale": (3, 4)}}
    shapes = {"layers": shapes, "wte": (7, 4), "head": {"kernel": (4, 7)}}
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    params = jax.tree.map(lambda n: np.ones(n, np.float32), shapes, is_leaf=is_shape)
    params = jax.device_put(params)
    stack, got = params["layers"], to_sparse(params)
    assert got["head"]["kernel"].shape == (7, 4)
    assert got["layers"] == stack
    assert got["wte"] is params["wte"]
    with pytest.raises(ValueError, match="no copies: convert the layers of a stack by themselves"):
        to_sparse(stack)


def test_export_in_a_compiled_program_is_refused():
    with pytest.raises(TypeError, match=r"outside jax\.jit"):
        jax.jit(to_sparse)(jnp.eye(2))


def test_params_without_a_matrix_to_replace_are_refused():
    params = {"layer": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(3)}}
    for given, include in (
        (params, False),
        ({"bias": jnp.ones(3)}, None),
        (jnp.ones((1, 2, 2)), None),
    ):
        with pytest.raises(ValueError, match="no matrix among the included leaves of"):
            to_sparse(given, include=include)
    assert to_sparse({}) == {}


def test_paths_of_units_are_those_of_a_dict_in_boxes_of_linen():
    params = {
        "a": {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)},
        "b": {"kernel": jnp.eye(2)[1:].T},
    }
    groups = {"hidden": [("a/kernel", -1), ("a/bias", -1), ("b/kernel", -2)]}
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None, "m")), params)
    small = remove_units(boxed, groups)
    assert small["a"]["kernel"].names == (None, "m")
    wanted = jax.tree.leaves(remove_units(params, groups))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(small), wanted)
