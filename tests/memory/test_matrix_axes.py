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
D, VOCABULARY, LAYERS = 64, 96, 2


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        return x + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(x))))


class LinenDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D)(tokens)
        for _ in range(LAYERS):
            x = LinenBlock()(x)
        return nn.Dense(VOCABULARY)(x)


class ScannedDecoder(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, D)(tokens)
        layers = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS,
        )  # fmt: skip
        x, _ = layers(LinenBlock(), x, None)
        return nn.Dense(VOCABULARY)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, D, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(D, rngs=rngs) for _ in range(2)])


class NnxDecoder(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, D, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(D, VOCABULARY, rngs=rngs)


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(64, (3, 3))(x)))
        return nn.Dense(10)(x.mean((1, 2)))


def equinox_decoder():
    keys = jax.random.split(jax.random.key(0), 5)
    layers = (
        eqx.nn.MultiheadAttention(4, D, key=keys[0]),
        eqx.nn.MLP(D, D, 4 * D, 1, key=keys[1]),
        eqx.nn.Conv2d(16, 32, 3, key=keys[2]),
        eqx.nn.Linear(D, VOCABULARY, key=keys[3]),
    )
    return eqx.filter(layers, eqx.is_array)


def linen(model, *inputs):
    return jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"]


TOKENS = jnp.zeros((2, 5), jnp.int32)
MODELS = {
    "linen": lambda: linen(LinenDecoder(), TOKENS),
    "nnx": lambda: nnx.state(NnxDecoder(nnx.Rngs(0)), nnx.Param),
    "equinox": equinox_decoder,
    "cnn": lambda: linen(Cnn(), jnp.zeros((2, 8, 8, 16))),
}


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


@pytest.mark.parametrize("name", MODELS)
def test_default_axes_keep_as_few_words_as_axes_by_hand(name):
    params = MODELS[name]()
    numbers = jax.tree_util.tree_map_with_path(by_hand, params)
    adam = optax.scale_by_adam()
    for rank in (1 / 4, 1 / 8):
        found, wanted = (
            optperm.memory.state_report(optperm.low_rank(adam, rank, **how), params)
            for how in ({}, {"dimension_numbers": numbers})
        )
        assert abs(found.words_per_param - wanted.words_per_param) < 0.01
        assert found.words_per_param < {1 / 4: 0.85, 1 / 8: 0.6}[rank]


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
    params = linen(ScannedDecoder(), TOKENS)
    tx = optperm.low_rank(optax.scale_by_adam(), 1 / 4)
    with pytest.warns(UserWarning, match=r"leaves 65% of the entries .* at full rank.*matrix_axes"):
        report = optperm.memory.state_report(tx, params)
    treatments = {leaf.name: leaf.treatment for leaf in report.leaves}
    names = [name for name in treatments if "query" in name and "kernel" in name]
    assert [treatments[name] for name in names] == [f"rank 16 of {LAYERS} x 64 x 64"]


def test_wrong_overrides_are_refused():
    params = {"w": jnp.ones((4, 4))}
    with pytest.raises(TypeError, match=r"w must be an optax\.contrib\.GaLoreDimensionNumbers"):
        optperm.memory.matrix_axes(params, w=(0, 1))
    with pytest.raises(ValueError, match=r"kernel is no element of a path in params: \['w'\]"):
        optperm.memory.matrix_axes(params, kernel=None)


def test_a_stack_of_four_axes_that_is_no_window_stays_at_full_rank():
    shapes = ((3, 64, 4, 16), (3, 4, 64, 256), (24, 24, 20, 8), (2, 3, 4, 5, 6))
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    assert optperm.memory.matrix_axes(params) == [None] * 4


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


def test_words_that_no_rank_reaches_are_refused_with_the_largest_leaf_at_full_rank():
    params = {"experts": jnp.ones((4, 64, 256)), "w": jnp.ones((64, 64))}
    says = r"words=0\.6 cannot be reached: .* keeps 1\.89 .* full rank is params\['experts'\]\."
    with pytest.raises(ValueError, match=says):
        optperm.memory.rank_for(params, words=0.6)


ALIASES = [
    (optperm.memory.low_rank_adamw, optperm.low_rank),
    (optperm.memory.apollo_adamw, optperm.apollo),
]


@pytest.mark.parametrize(("alias", "direction"), ALIASES)
def test_aliases_are_the_chain_that_they_name(alias, direction):
    """With a rate that `optax.inject_hyperparams` gives, and other options for Adam than its own."""
    params = {"w": support.normal((16, 24)), "b": support.normal((24,))}
    adam = {"b1": 0.8, "b2": 0.99, "eps": 1e-6}
    decay_rates = {"b1": 0.8, "b2": 0.99} if direction is optperm.low_rank else {}
    static = ("rank", "b1", "b2", "eps", "weight_decay", "every")
    whole = optax.inject_hyperparams(alias, static_args=static)(
        lambda count: 0.01 / (1 + count), rank=4, every=2, weight_decay=0.1, **adam
    )
    parts = optax.chain(
        direction(optax.scale_by_adam(**adam), 4, every=2, **decay_rates),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(lambda count: 0.01 / (1 + count)),
    )
    grads = [support.random_like(params, step) for step in range(4)]
    (wanted, _), (found, _) = (loops.train(tx, params, grads)[-1] for tx in (parts, whole))
    support.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("alias", "direction"), ALIASES)
def test_aliases_have_every_argument_of_their_direction(alias, direction):
    own, theirs = (inspect.signature(each).parameters for each in (alias, direction))
    for name, argument in theirs.items():
        if name not in ("inner", "rank"):
            assert own[name].default == argument.default
