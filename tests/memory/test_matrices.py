"""The axes of matrices in the layers of Flax, Equinox and plain JAX, by default."""

import functools
import inspect
import itertools

import chex
import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
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
            for how in ({}, {"axes": numbers})
        )
        assert abs(found.words_per_param - wanted.words_per_param) < 0.01
        assert found.words_per_param < most


def test_each_layer_of_a_stack_has_its_own_basis_on_any_axis():
    """Scanned on axis 0 or 1, layers have as many words of state as unrolled ones."""
    layer = linen_layers()
    adam, one = optax.scale_by_adam(), optperm.memory.state_report
    unrolled = {str(index): layer for index in range(2)}
    for axis in (0, 1):
        stacked = jax.tree.map(
            lambda leaf, axis=axis: jax.ShapeDtypeStruct(
                (*leaf.shape[:axis], 2, *leaf.shape[axis:]), leaf.dtype
            ),
            layer,
        )
        tx = optperm.low_rank(adam, 1 / 4)
        report = one(tx, stacked)
        assert report.words_per_param == pytest.approx(one(tx, unrolled).words_per_param, rel=1e-3)
        treatments = {leaf.name: leaf.treatment for leaf in report.leaves}
        assert treatments["['attention']['query']['kernel']"] == "rank 16 of 2 x 64 x 64"
        assert treatments["['up']['kernel']"] == "rank 16 of 2 x 64 x 256"


def layer(seed):
    """Return gradients of one layer, with heads, a norm and a bias."""
    rng = np.random.default_rng(seed)
    keys = ("attention/query/kernel", (8, 2, 4)), ("attention/query/bias", (2, 4))
    keys += ("norm/scale", (8,)), ("up/kernel", (8, 12)), ("moe/experts/kernel", (3, 8, 5))
    tree = {}
    for path, shape in keys:
        node = tree
        for each in path.split("/")[:-1]:
            node = node.setdefault(each, {})
        node[path.rsplit("/", 1)[1]] = rng.normal(size=shape).astype(np.float32)
    return tree


def experts(axis):
    """Experts without a known name, in a stack of layers or in a single layer, with given axes."""
    at = () if axis is None else (axis,)
    count, rows, columns = (i for i in range(3 + len(at)) if i not in at)
    return {"experts": optperm.LeafAxes("kernel", rows, columns, (*at, count))}


def last_updates(tx, grads, params=None):
    """Return the updates of the last of some steps, for params that stay."""
    start = jax.tree.map(lambda g: g[0], grads) if params is None else params

    def step(state, grad):
        updates, state = tx.update(grad, state, start)
        return state, updates

    return jax.tree.map(lambda u: u[-1], jax.lax.scan(step, tx.init(start), grads)[1])


METHODS = {
    "low_rank": lambda axes: optperm.low_rank(
        optax.scale_by_adam(), 2, projection="svd", axes=axes
    ),
    "larger side": lambda axes: optperm.low_rank(
        optax.trace(0.9), 2, projection="svd", residual=None, side="larger", every=1, axes=axes
    ),
}


@pytest.mark.parametrize(
    ("name", "axis"),
    support.every_night(itertools.product(METHODS, (0, 1)), [("low_rank", 1)]),
)
def test_stacked_layers_step_as_each_layer_alone(name, axis):
    """Two layers with three experts, in any order of the axes of layers and experts."""

    def without_heads(seed):
        return {name: part for name, part in layer(seed).items() if name != "attention"}

    steps = [[without_heads(10 * step + index) for index in range(2)] for step in range(3)]
    stacked = [
        {"layers": jax.tree.map(lambda *leaves: np.stack(leaves, axis), *each)} for each in steps
    ]
    train, train_stacked = (
        jax.jit(functools.partial(last_updates, METHODS[name](axes)))
        for axes in (
            optperm.leaf_axes(steps[0][0], **experts(None)),
            optperm.leaf_axes(stacked[0], **experts(axis)),
        )
    )
    found = jax.tree.map(np.asarray, train_stacked(replicas.stack(stacked))["layers"])
    for index in range(2):
        own = jax.tree.map(lambda leaf, i=index: np.take(leaf, i, axis), found)
        chex.assert_trees_all_close(
            own, train(replicas.stack([each[index] for each in steps])), rtol=0, atol=2e-4
        )


def test_random_projections_of_stacked_layers_have_the_law_of_unrolled_ones():
    """The mean and the spread, over keys, of the logarithm of the norm of each layer's update."""
    grads = [layer(index)["up"] for index in range(3)]
    stacked = {"layers": replicas.stack(grads)}
    stacked["layers"]["norm"] = {"scale": np.ones((3, 8), np.float32)}
    unrolled = {str(index): grad for index, grad in enumerate(grads)}

    def norms(key, tree):
        tx = optperm.apollo(optax.scale_by_adam(), 2, limit=None, key=key)
        updates, _ = tx.update(tree, tx.init(tree), tree)
        if "layers" in updates:
            kernels = updates["layers"]["kernel"]
            return jnp.linalg.norm(kernels, axis=(1, 2))
        return jnp.stack([jnp.linalg.norm(updates[str(i)]["kernel"]) for i in range(3)])

    @jax.jit
    def logarithms():
        keys = jax.random.split(jax.random.key(1), 400)
        trees = stacked, unrolled
        return [jnp.log(jax.vmap(norms, in_axes=(0, None))(keys, tree)) for tree in trees]

    a, b = map(np.asarray, logarithms())
    error = np.hypot(a.std(0), b.std(0)) / np.sqrt(len(a))
    assert np.all(np.abs(a.mean(0) - b.mean(0)) < 4 * error)
    np.testing.assert_allclose(a.std(0), b.std(0), rtol=0.2)
    # Layers are projected independently.
    correlation = np.corrcoef(a.T)
    assert np.all(np.abs(correlation[np.triu_indices(3, 1)]) < 4 / np.sqrt(len(a)))


def test_experts_of_unknown_names_stay_at_full_rank_until_they_are_named():
    wi, scale = np.zeros((4, 16, 32), np.float32), np.zeros(16, np.float32)
    params = {"wi": wi, "norm": {"scale": scale}}
    with pytest.warns(UserWarning, match=r"apollo leaves \['wi'\] alone"):
        state = optperm.apollo(rank=4).init(params)
    assert state.inner_state.mu["wi"].shape == (4, 16, 32)
    axes = optperm.leaf_axes(params, wi=optperm.LeafAxes("kernel", 1, 2, 0))
    state = jax.eval_shape(optperm.apollo(rank=4, axes=axes).init, params)
    assert state.inner_state.mu["wi"].shape == (4, 4, 32)


def test_rank_for_keeps_the_words_and_the_next_rank_does_not():
    shapes, adam = {"a": (512, 2048), "b": (2048,)}, optax.scale_by_adam()
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    for words in (0.3, 0.6, 1.2):
        rank = optperm.memory.rank_for(params, words)
        kept, more = (
            optperm.memory.state_report(optperm.low_rank(adam, each), params).words_per_param
            for each in (rank, rank + 1 / 256)
        )
        assert kept <= words + 1e-3 < more + 2e-3
        np.testing.assert_allclose(kept, words, atol=0.02)


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
    rng = np.random.default_rng(0)
    params, *grads = (
        {"w": rng.normal(size=(16, 24)).astype(np.float32), "b": np.ones(24, np.float32)}
        for _ in range(5)
    )
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
    wanted, found = jax.jit(lambda g: [last_updates(tx, g, params) for tx in (parts, whole)])(
        replicas.stack(grads)
    )
    chex.assert_trees_all_close(found, wanted, rtol=1e-5, atol=1e-6)
