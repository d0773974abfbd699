"""The axes of matrices in the layers of Flax, Equinox and plain JAX, by default."""

import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from flax import nnx

import optperm

pytestmark = pytest.mark.usefixtures("lenient")
Numbers = optax.contrib.GaLoreDimensionNumbers
D, VOCABULARY = 64, 96
SEQUENCE, IMAGE = (2, 5, D), (2, 8, 8, 16)


def linen(layer, shape, dtype=jnp.float32):
    inputs = jax.ShapeDtypeStruct(shape, dtype)
    return jax.eval_shape(layer.init, jax.random.key(0), inputs)["params"]


def linen_layers():
    return {
        "embed": linen(nn.Embed(VOCABULARY, D), (2, 5), jnp.int32),
        "attention": linen(nn.MultiHeadDotProductAttention(4), SEQUENCE),
        "up": linen(nn.Dense(4 * D), SEQUENCE),
        "norm": linen(nn.LayerNorm(), SEQUENCE),
    }


def convolutions():
    return {
        "conv": linen(nn.Conv(64, (3, 3)), IMAGE),
        "norm": linen(nn.BatchNorm(use_running_average=False), IMAGE),
        "dense": linen(nn.Dense(10), IMAGE),
    }


def nnx_layers():
    def make():
        layers = {
            "embed": nnx.Embed(VOCABULARY, D, rngs=nnx.Rngs(0)),
            "attention": nnx.MultiHeadAttention(4, D, decode=False, rngs=nnx.Rngs(0)),
            "up": nnx.Linear(D, 4 * D, rngs=nnx.Rngs(0)),
            "norm": nnx.LayerNorm(D, rngs=nnx.Rngs(0)),
        }
        return {name: nnx.state(layer, nnx.Param) for name, layer in layers.items()}

    return jax.eval_shape(make)


def equinox_layers():
    def make(key):
        layers = (
            eqx.nn.MultiheadAttention(4, D, key=key),
            eqx.nn.MLP(D, D, 4 * D, 1, key=key),
            eqx.nn.Conv2d(16, 32, 3, key=key),
        )
        return eqx.filter(layers, eqx.is_array)

    return eqx.filter_eval_shape(make, jax.random.key(0))


def by_hand(path, leaf):
    """The axes of one who knows each layer, from the end of its path and its shape."""
    path, shape = jax.tree_util.keystr(path), leaf.shape
    if "embedding" in path or "bias" in path or "scale" in path or len(shape) < 2:
        return None
    if len(shape) == 4:
        return Numbers((1, 2, 3), 0) if shape[2:] == (3, 3) else Numbers((0, 1, 2), 3)
    if len(shape) == 3:
        return Numbers((0, 1), 2) if "out" in path else Numbers(0, (1, 2))
    return Numbers(0, 1)


@pytest.mark.parametrize("model", [linen_layers, convolutions, nnx_layers, equinox_layers])
def test_default_axes_keep_as_few_words_as_axes_by_hand(model):
    params, adam = model(), optax.scale_by_adam()
    numbers = jax.tree_util.tree_map_with_path(by_hand, params)
    for rank, most in ((1 / 4, 0.95), (1 / 8, 0.7)):
        found, wanted = (
            optperm.memory.state_report(optperm.low_rank(adam, rank, **how), params)
            for how in ({}, {"dimension_numbers": numbers})
        )
        assert abs(found.words_per_param - wanted.words_per_param) < 0.01
        assert found.words_per_param < most


def test_axes_are_found_by_whole_elements_of_paths_and_printed(capsys):
    kernel = jnp.ones((12, 4, 8))
    params = {
        "attention": {"query": {"kernel": kernel, "bias": jnp.ones((4, 8))}},
        "my_query": {"kernel": kernel},
        "out": {"kernel": jnp.ones((3, 4, 8, 12))},
        "wte": jnp.ones((9, 5)),
    }
    axes = optperm.memory.matrix_axes(params, wte=None)
    assert axes["attention"]["query"] == {"kernel": Numbers(-3, (-2, -1)), "bias": None}
    assert axes["my_query"]["kernel"] is axes["wte"] is None
    assert axes["out"]["kernel"] == Numbers((-3, -2), -1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[1:]] == [
        "bias", "attention", "full rank", "attention", "as given for wte",
    ]  # fmt: skip
    assert "3 x 32 x 12" in lines[4]


def test_axes_of_a_scanned_model_are_those_of_each_layer():
    """Of attention; kernels of other layers of three axes stay at full rank, which is warned of."""
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((2, *leaf.shape), leaf.dtype), linen_layers()
    )
    tx = optperm.low_rank(optax.scale_by_adam(), 1 / 4)
    with pytest.warns(UserWarning, match=r"leaves 59% of the entries .* at full rank.*matrix_axes"):
        report = optperm.memory.state_report(tx, params)
    treatments = {leaf.name: leaf.treatment for leaf in report.leaves}
    assert treatments["['attention']['query']['kernel']"] == "rank 16 of 2 x 64 x 64"
    assert treatments["['up']['kernel']"].startswith("full rank")


def test_leaves_of_four_axes_are_convolutions_by_their_smaller_window_or_stay_at_full_rank():
    wanted = {
        (3, 3, 16, 16): Numbers((0, 1, 2), 3),
        (16, 16, 3, 3): Numbers((1, 2, 3), 0),
        **dict.fromkeys([(3, 64, 4, 16), (3, 4, 64, 256), (24, 24, 20, 8), (2, 3, 4, 5, 6)]),
    }
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in wanted]
    assert optperm.memory.matrix_axes(params) == list(wanted.values())


def test_rank_for_keeps_the_words_and_the_next_rank_does_not():
    params, adam = {"a": jnp.zeros((512, 2048)), "b": jnp.zeros(2048)}, optax.scale_by_adam()
    for words in (0.3, 0.6, 1.2):
        rank = optperm.memory.rank_for(params, words)
        kept, more = (
            optperm.memory.state_report(optperm.low_rank(adam, each), params).words_per_param
            for each in (rank, rank + 1 / 256)
        )
        assert kept <= words + 1e-3 < more + 2e-3
        np.testing.assert_allclose(kept, words, atol=0.02)


def test_overrides_and_words_that_cannot_work_are_refused():
    """Words that no rank reaches with the largest leaf at full rank."""
    params = {"experts": jnp.ones((4, 64, 256)), "w": jnp.ones((64, 64))}
    axes, rank_for = optperm.memory.matrix_axes, optperm.memory.rank_for
    element = r"kernel must be an element of a path, one of \['experts', 'w'\]"
    words = r"words=0\.6 cannot be reached: .* needs 1\.89 .* full rank is params\['experts'\]\."
    for refuses, options, error, says in (
        (axes, {"w": (0, 1)}, TypeError, r"w must be an optax\.contrib\.GaLoreDimensionNumbers"),
        (axes, {"kernel": None}, ValueError, element),
        (rank_for, {"words": 0.6}, ValueError, words),
    ):
        with pytest.raises(error, match=says):
            refuses(params, **options)


@pytest.mark.parametrize(
    ("alias", "direction"),
    [
        (optperm.memory.low_rank_adamw, optperm.low_rank),
        (optperm.memory.apollo_adamw, optperm.apollo),
    ],
)
def test_aliases_are_the_chain_that_they_name(alias, direction):
    """With every argument of the direction, a rate that `optax.inject_hyperparams` gives, and other
    options for Adam than its own."""
    own, theirs = (inspect.signature(each).parameters for each in (alias, direction))
    for name in theirs.keys() - {"inner", "rank"}:
        assert own[name].default == theirs[name].default
    params = {"w": support.normal((16, 24)), "b": support.normal((24,))}
    adam = {"b1": 0.8, "b2": 0.99, "eps": 1e-6}
    decay_rates = {"b1": 0.8, "b2": 0.99} if direction is optperm.low_rank else {}
    rate = lambda count: 0.01 / (1 + count)  # noqa: E731
    static = ("rank", "b1", "b2", "eps", "weight_decay", "every")
    whole = optax.inject_hyperparams(alias, static_args=static)(
        rate, rank=4, every=2, weight_decay=0.1, **adam
    )
    parts = optax.chain(
        direction(optax.scale_by_adam(**adam), 4, every=2, **decay_rates),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(rate),
    )
    grads = [support.random_like(params, step) for step in range(4)]
    (wanted, _), (found, _) = (loops.train(tx, params, grads)[-1] for tx in (parts, whole))
    support.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
