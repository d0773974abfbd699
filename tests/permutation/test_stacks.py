"""What the axes of a leaf mean to the permutation methods: stacks, heads, experts, leaves that stay.

A stack of layers trains as the layers by themselves, and no weight leaves its layer or its output unit.
"""

import functools
import itertools
import re
import warnings

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support
from flax import nnx

import optperm
from optperm import LeafAxes
from optperm.core.fingerprints import compare_fingerprints, list_fingerprints
from optperm.permutation import apply_permutation, export_permutation, permuted_params

LAYERS = 2
EXPERTS = LeafAxes("kernel", 1, 2, 0)
# A layer in which only the kernels of experts need given axes.
SHAPES = {
    "norm": {"scale": (6,)},
    "attention": {"query": {"kernel": (6, 2, 4)}},
    "experts": (2, 6, 5),
}


def is_shape(node):
    return isinstance(node, tuple)


def draw(seed):
    """Draw numbers for an embedding and for each layer, all distinct and exact in any sum of a few."""
    shapes = {"embed": {"embedding": (11, 6)}}
    shapes |= {f"layer_{index}": SHAPES for index in range(LAYERS)}
    flat, structure = jax.tree.flatten(shapes, is_leaf=is_shape)
    ends = np.cumsum([np.prod(shape) for shape in flat])
    numbers = np.float32(np.random.default_rng(seed).permutation(ends[-1]) / 1024)
    parts = np.split(numbers, ends[:-1])
    return structure.unflatten([a.reshape(shape) for a, shape in zip(parts, flat, strict=True)])


def stack(tree, axis):
    """Return the tree with all layers in one, stacked along an axis."""
    layers = [tree[f"layer_{index}"] for index in range(LAYERS)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves, axis), *layers)
    return {"embed": tree["embed"], "layers": stacked}


def axes_of(params, axis=None):
    """Return the axes of the unrolled model, or of the model with layers on an axis."""
    experts = EXPERTS
    if axis is not None:
        roles = (EXPERTS.in_axis, EXPERTS.out_axis, EXPERTS.batch_axis)
        moved = [tuple(each + (each >= axis) for each in role) for role in roles]
        experts = LeafAxes("kernel", moved[0], moved[1], (axis, *moved[2]))
    return optperm.leaf_axes(params, experts=experts)


def last(tx, params, grads):
    """Return the params and the state after all steps, by one program."""
    return loops.train(tx, params, grads, how="scan", init="jit")[-1]


METHODS = {
    "laperm": lambda axes: optperm.laperm(optax.sgd(1.0, 0.5), 2, axes=axes),
    "permute_by_cycles": lambda axes: optperm.permute_by_cycles(0.4, 1.0, axes=axes),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("method", "axis"), support.every_night(itertools.product(METHODS, (0, 1)), [("laperm", 1)])
)
def test_stacked_layers_train_as_the_layers_by_themselves(method, axis):
    """Bit for bit, in the params, in the exact weights, and in what an export rebuilds."""
    unrolled, *grads = map(draw, range(5))
    grads = jax.tree.map(lambda g: g - 0.25, grads)
    scanned = stack(unrolled, axis)
    axes, stacked_axes = axes_of(unrolled), axes_of(scanned, axis)
    expected, state = last(METHODS[method](axes), unrolled, grads)
    pulls = [stack(g, axis) for g in grads]
    got, stacked_state = last(METHODS[method](stacked_axes), scanned, pulls)
    support.assert_same_bits(got, stack(expected, axis))
    ranks = stack(state.ranks, axis)
    support.assert_same_bits(stacked_state.ranks, ranks)
    moved = jax.tree.map(lambda after, before: np.mean(np.asarray(after) != before), got, scanned)
    assert min(jax.tree.leaves(moved)) > 0.2
    # Between two synchronizations, the exact weights of LaPerm are the params.
    params = jax.tree.map(lambda p, g: np.asarray(p) - g, expected, grads[0])
    exact = jax.jit(functools.partial(permuted_params, axes=axes))(state, params)
    params, wanted = stack(params, axis), stack(exact, axis)
    export = jax.jit(functools.partial(export_permutation, axes=stacked_axes))
    permutation = export(scanned, stacked_state, params)
    support.assert_same_bits(jax.jit(apply_permutation)(scanned, permutation), wanted)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("method", support.every_night(METHODS, ["permute_by_cycles"]))
def test_numbers_of_layers_stay_as_in_each_layer(method):
    """One gain per layer is a scalar, which stays; a vector outside the stack is permuted."""
    layers = {"norm": {"scale": support.normal((3, 6))}, "gain": support.bias(3, 1)}
    params = {"layers": layers, "slopes": support.bias(5, 2)}
    grads = [support.random_like(params, seed) for seed in range(4)]
    after, _ = last(METHODS[method](None), params, grads)
    support.assert_same_bits(after["layers"]["gain"], layers["gain"])
    for got, start in ((after["slopes"], params["slopes"]), (after["layers"], layers)):
        assert np.any(np.asarray(jax.tree.leaves(got)[-1]) != jax.tree.leaves(start)[-1])


def test_random_partitions_of_stacked_layers_have_the_law_of_the_layers():
    """Of the same weights, each layer moves as many as a layer alone, and draws its own partitions."""
    w, m = (support.normal((24, 40), seed) for seed in range(2))

    @functools.partial(jax.jit, static_argnums=2)
    def moved(w, m, axes):
        tx = optperm.permute_by_cycles(0.1, 0.25, min_partition_size=2, axes=axes)
        start = tx.init(w)

        def of_key(key):
            state = tx.update(m, start._replace(key=jax.random.key_data(key)), w)[1]
            return state.ranks != start.ranks

        return jax.vmap(of_key)(jax.random.split(jax.random.key(0), 200))

    alone = moved(w, m, LeafAxes("kernel", 0, 1))
    stacked = moved(np.stack([w] * 2), np.stack([m] * 2), EXPERTS)
    # The moves of one key, of 40 weight vectors, are one draw of the mean.
    alone, stacked = map(np.asarray, (alone, stacked))
    draws = alone.mean(axis=2), *stacked.mean(axis=3).swapaxes(0, 1)
    assert 0.2 < draws[0].mean() < 0.9
    for layer in draws[1:]:
        error = np.sqrt(sum(each.var(axis=0) for each in (draws[0], layer)) / 200)
        assert np.all(np.abs(layer.mean(axis=0) - draws[0].mean(axis=0)) < 5 * error)
    assert np.mean(stacked[:, 0] != stacked[:, 1]) > 0.1


def test_each_index_of_copies_and_outputs_is_a_weight_vector_of_its_own():
    """Leaves of any kind, rank and roles are put in order as by NumPy, vector by vector."""
    rng, axes, shapes = np.random.default_rng(2), [], []
    for kind in ("kernel", "embedding", "scale", "bias") * 2:
        needed, others = ("io", "iob") if kind in ("kernel", "embedding") else ("o", "ob")
        roles = rng.permutation([*needed, *rng.choice([*others], rng.integers(3))])
        axes.append(LeafAxes(kind, *(np.flatnonzero(roles == own).tolist() for own in "iob")))
        shapes.append(rng.integers(1, 5, len(roles)).tolist())
    w, g = ([*map(support.normal, shapes, 2 * np.arange(8) + seed)] for seed in range(2))
    tx = optperm.laperm(optax.sgd(1.0), 1, axes=axes)
    got = jax.jit(lambda w, g: permuted_params(tx.update(g, tx.init(w), w)[1]))(w, g)
    expected = jax.tree.map(np.array, w)
    moved = [np.asarray(w) - np.asarray(g) for w, g in zip(w, g, strict=True)]
    for own, shape, leaf, goal in zip(axes, shapes, expected, moved, strict=True):
        is_kernel = own.kind in ("kernel", "embedding")
        counted = own.batch_axis + own.out_axis if is_kernel else own.batch_axis
        for index in itertools.product(*(range(shape[axis]) for axis in counted)):
            at = dict(zip(counted, index, strict=True))
            where = tuple(at.get(axis, slice(None)) for axis in range(len(shape)))
            order = np.argsort(np.argsort(goal[where], axis=None)).reshape(goal[where].shape)
            leaf[where] = np.sort(leaf[where], axis=None)[order]
    support.assert_same_bits(got, expected)


OTHERS = {
    "kernel": np.asarray(support.normal((12, 5))),
    "unknown": np.asarray(support.normal((2, 8, 3), 1)),
    "bias": np.asarray(support.bias(5, 2)),
}
BOTH = {
    "sgperm": lambda **axes: optperm.sgperm(0.5, **axes),
    "laperm": lambda **axes: optperm.laperm(optax.sgd(1.0, 0.5), 2, **axes),
}


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:.* leaves .'unknown'. alone")
@pytest.mark.parametrize("method", support.every_night(BOTH, ["laperm"]))
def test_leaves_of_unknown_axes_stay_and_are_named(method):
    """A tree with None says the same without a warning, and what the warning advises permutes them."""

    @jax.jit
    def rebuild(params, state):
        permutation = export_permutation(params, state)
        return permutation, apply_permutation(params, permutation)

    grads = [support.random_like(OTHERS, seed) for seed in range(4)]
    tx = BOTH[method]()
    with pytest.warns(
        UserWarning, match=r"leaves \['unknown'\] alone, because the roles"
    ) as caught:
        tx.init(OTHERS)
    (warning,) = caught
    advice = re.search(r"axes=(.*), or None to leave", str(warning.message))[1]
    trail = loops.train(tx, OTHERS, grads, how="scan", init="jit")
    for after, _ in trail:
        support.assert_same_bits(after["unknown"], OTHERS["unknown"])
    params, state = trail[-1]
    support.assert_permutes(params, OTHERS)
    assert np.any(np.asarray(params["kernel"]) != OTHERS["kernel"])
    permutation, rebuilt = rebuild(OTHERS, state)
    np.testing.assert_array_equal(np.ravel(permutation["unknown"]), np.arange(48))
    support.assert_same_bits(rebuilt, params)
    known = {"kernel": LeafAxes("kernel", 0, 1), "unknown": None, "bias": LeafAxes("bias", (), 0)}
    with warnings.catch_warnings(action="error"):
        named, other_state = last(BOTH[method](axes=known), OTHERS, grads)
    support.assert_same_bits(named, params)
    assert not compare_fingerprints(*map(list_fingerprints, (other_state, state)))
    axes = eval(advice, {"optperm": optperm, "params": OTHERS})
    trained, _ = last(BOTH[method](axes=axes), OTHERS, grads)
    assert np.any(np.asarray(trained["unknown"]) != OTHERS["unknown"])


def test_leaves_that_stay_are_not_counted_and_led_back():
    """The fraction is of the weights in weight vectors; a change by something else is undone."""
    tx, axes = optperm.permute_by_cycles(1.0, 1.0, axes=lambda _: axes), {}
    axes |= {"kernel": LeafAxes("kernel", 0, 1), "unknown": None, "bias": None}
    start, m = jax.jit(tx.init)(OTHERS), support.random_like(OTHERS, 3)
    step = jax.jit(tx.update)
    updates, state = step(m, start, OTHERS)
    changed = np.mean(np.asarray(state.ranks["kernel"]) != start.ranks["kernel"])
    np.testing.assert_allclose(state.fraction_moved, changed, rtol=1e-6)
    assert changed > 0.3
    assert not np.any(np.asarray(updates["unknown"]))
    assert not np.any(np.asarray(updates["bias"]))
    pushed = OTHERS | {"unknown": OTHERS["unknown"] + 1.0}
    updates, state = step(m, start, pushed)
    restored = jax.jit(optperm.apply_updates)(pushed, updates, state)
    support.assert_same_bits(restored["unknown"], OTHERS["unknown"])
    assert state.mismatches == 1


VECTORS = {"one": support.bias(9), "several": {"slopes": support.bias(9), "x": support.bias(7, 1)}}


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(("number", "method"), support.in_turns(VECTORS, BOTH))
def test_vectors_of_any_name_are_permuted_whole(number, method):
    """Params with no leaf of two axes, as of a regression, need no axes."""
    params = VECTORS[number]
    grads = [support.random_like(params, seed) for seed in range(2)]
    after, _ = last(BOTH[method](), params, grads)
    support.assert_permutes(after, params)
    for leaf, start in zip(jax.tree.leaves(after), jax.tree.leaves(params), strict=True):
        assert np.any(np.asarray(leaf) != start)


@pytest.mark.usefixtures("lenient")
def test_masked_parts_take_the_axes_of_the_whole_model():
    """A part of a stack does not show that it is one; the axes of all params say it."""
    params, grads = ({"layers": stack(draw(seed), 0)["layers"]} for seed in range(2))
    del params["layers"]["experts"], grads["layers"]["experts"]
    is_kernel = jax.tree_util.tree_map_with_path(lambda path, _: "kernel" in str(path), params)
    axes, whole = optperm.leaf_axes(params), optperm.laperm(optax.sgd(1.0), 1)
    tx = optax.chain(
        optax.masked(optperm.laperm(optax.sgd(1.0), 1, axes=axes), is_kernel),
        optax.masked(optax.set_to_zero(), jax.tree.map(lambda own: not own, is_kernel)),
    )
    masked, state = last(tx, params, [grads])
    expected, _ = last(whole, params, [grads])
    expected = jax.tree.map(lambda own, new, old: new if own else old, is_kernel, expected, params)
    support.assert_same_bits(masked, expected)

    @jax.jit
    def rebuild(params, state):
        return apply_permutation(params, export_permutation(params, state, axes=axes))

    support.assert_same_bits(rebuild(params, state), expected)


class Attention(nnx.Module):
    """The part of an attention whose outputs are heads."""

    def __init__(self, rngs):
        options = {"param_dtype": "bfloat16", "bias_init": nnx.initializers.normal()}
        self.query = nnx.LinearGeneral(8, (2, 4), rngs=rngs, **options)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.attention = Attention(rngs)


class Layers(nnx.Module):
    """Three scanned layers; the first layer starts with the largest weights."""

    def __init__(self):
        self.layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(
            jax.random.split(jax.random.key(0), 3)
        )
        state = nnx.state(self.layers, nnx.Param)
        for index, depth in enumerate((1.0, 0.5, 0.1)):
            state = jax.tree.map(lambda p, i=index, d=depth: p.at[i].multiply(d), state)
        nnx.update(self.layers, state)


@pytest.mark.usefixtures("lenient")
def test_scanned_layers_of_nnx_keep_the_weights_of_each_layer_and_head():
    """With an nnx.Optimizer, whose state has variables and whose updates have plain arrays."""

    @nnx.jit
    def create():
        model = Layers()
        return model, nnx.Optimizer(model, optperm.sgperm(1.0), wrt=nnx.Param)

    start = nnx.state(create()[0], nnx.Param)
    model, optimizer = create()

    def loss_fn(model):
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        return sum(jnp.sum(p * support.normal(p.shape, dtype=p.dtype)) for p in leaves)

    @nnx.jit
    def step(model, optimizer):
        optimizer.update(model, nnx.grad(loss_fn)(model))

    for _ in range(5):
        step(model, optimizer)
    before, after = (
        jax.tree.map(lambda p: np.asarray(p, np.float32), nnx.to_pure_dict(state))["layers"][
            "attention"
        ]
        for state in (start, permuted_params(optimizer.opt_state))
    )
    kernels = before["query"]["kernel"], after["query"]["kernel"]
    assert np.mean(kernels[0] != kernels[1]) > 0.2
    np.testing.assert_array_equal(*(np.sort(kernel, axis=1) for kernel in kernels))
    # A layer's bias is one weight vector, over its heads too.
    biases = before["query"]["bias"], after["query"]["bias"]
    np.testing.assert_array_equal(*(np.sort(bias.reshape(3, 8)) for bias in biases))
    assert np.any(np.sort(biases[0]) != np.sort(biases[1]))
    rebuilt = jax.jit(
        lambda start, state: apply_permutation(start, export_permutation(start, state))
    )(start, optimizer.opt_state)
    exact = permuted_params(optimizer.opt_state, nnx.state(model, nnx.Param))
    for one, other in zip(jax.tree.leaves(rebuilt), jax.tree.leaves(exact), strict=True):
        support.assert_same_bits(one, other)
