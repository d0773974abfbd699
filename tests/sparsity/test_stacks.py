"""Stacked layers: a scanned model has the masks of the unrolled model, layer by layer."""

import functools
import itertools
import math
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.sparsity import Blocks, NOfM, Units, erk_sparsity, freeze, keep_top, prune
from optperm.sparsity._choice import nearest_count

pytestmark = pytest.mark.usefixtures("lenient")

KERNEL = functools.partial(optperm.LeafAxes, "kernel")
# The shape of a layer, its input axes and its output axes: a matrix, an output of attention with its
# heads, and a query whose outputs come first.
SHAPES = {
    "up": ((8, 6), (0,), (1,)),
    "out": ((2, 4, 5), (0, 1), (2,)),
    "query": ((2, 3, 4), (2,), (0, 1)),
}
# The lengths of the axes of copies, and the places of these axes in a leaf.
LAYOUTS = {
    "first": ((2,), (0,)),
    "second": ((2,), (1,)),
    "experts": ((2, 2), (0, 1)),
    "apart": ((2, 2), (2, 0)),
}
MASKS = optperm.mask_elements()
SGD = optax.sgd(0.1, momentum=0.9)


def unrolled(layout, seed):
    """Return leaves for each layer of a model."""
    layers = range(math.prod(LAYOUTS[layout][0]))
    return {
        f"layer{i}": {
            name: np.asarray(support.normal(shape, 100 * seed + 10 * i + j))
            for j, (name, (shape, *_)) in enumerate(SHAPES.items())
        }
        for i in layers
    }


def stacked(layout, layers):
    """Return the layers of a model as stacks, with the axes of copies at their places."""
    lengths, places = LAYOUTS[layout]

    def stack(*leaves):
        whole = np.stack(leaves).reshape(*lengths, *leaves[0].shape)
        return np.moveaxis(whole, range(len(lengths)), places)

    return jax.tree.map(stack, *layers.values())


def split(layout, stacks):
    """Return the layers of stacks: the inverse of `stacked`."""
    lengths, places = LAYOUTS[layout]

    def layers_of(leaf):
        apart = np.moveaxis(np.asarray(leaf), places, range(len(lengths)))
        return apart.reshape(-1, *apart.shape[len(lengths) :])

    rows = jax.tree.map(layers_of, stacks)
    return {
        f"layer{i}": jax.tree.map(lambda row, i=i: row[i], rows) for i in range(math.prod(lengths))
    }


def axes_of(layout):
    """Return the axes of the unrolled leaves of each layer, and of the stacks."""
    lengths, places = LAYOUTS[layout]
    alone = {name: KERNEL(*roles) for name, (_, *roles) in SHAPES.items()}
    of_stacks = {}
    for name, (shape, *roles) in SHAPES.items():
        rank = len(shape) + len(lengths)
        own = [axis for axis in range(rank) if axis not in places]
        of_stacks[name] = KERNEL(*([own[axis] for axis in role] for role in roles), places)
    return {f"layer{i}": alone for i in range(math.prod(lengths))}, of_stacks


def trained(tx, grads, params, mask=None):
    """Return the masks after steps, if given from the first mask on."""
    state = tx.init(params)
    if mask is not None:
        state = state._replace(mask=mask, count=jnp.int32(1))
    step = loops.make_step(tx)

    def body(carried, batch):
        params, state = step(*carried, batch)
        return (params, state), state.mask

    batches = jax.tree.map(lambda g, w: jnp.stack([g, w, g]), grads, params)
    _, masks = jax.lax.scan(body, (params, state), batches)
    return [replicas.take(masks, index) for index in range(3)]


def pruning(structure=None, scope="erk", sparsity=0.6):
    def masks(params, scores, axes):
        options = {"scores": jax.tree.map(jnp.abs, scores), "axes": axes}
        options |= {"scope": scope, "structure": structure}
        _, state = prune(params, MASKS.init(params), sparsity, **options)
        top = keep_top(params, sparsity, scope=scope, structure=structure, axes=axes)
        return [state.mask, jax.tree.map(lambda leaf: leaf != 0, top)]

    return masks


def freezing(scope):
    return lambda params, scores, axes: [
        freeze(MASKS.init(params), 0.3, scores=scores, scope=scope, axes=axes).mask
    ]


def ramping(criterion, scope, structure=None):
    def masks(params, grads, axes):
        ramp = optax.linear_schedule(0.2, 1.0, 2)
        options = {"criterion": criterion, "scope": scope, "structure": structure, "axes": axes}
        tx = optperm.prune_gradually(SGD, 0.7, ramp, every=1, **options)
        return trained(tx, grads, params)

    return masks


def moving(params, grads, axes):
    """Drop and grow from a mask of the positive entries, whose numbers differ from layer to layer."""
    tx = optperm.rigl(SGD, 0.5, end=99, every=1, axes=axes)
    return trained(tx, grads, params, jax.tree.map(lambda leaf: leaf > 0, params))


CHOICES = {
    "prune erk": pruning(),
    "prune leaf": pruning(scope="leaf"),
    "prune global": pruning(scope="global"),
    "prune unit": pruning(scope="unit"),
    "prune n of m": pruning(NOfM(1, 2), sparsity=None),
    "prune blocks": pruning(Blocks(3, 2)),
    "prune units": pruning(Units(), scope="leaf"),
    "prune units global": pruning(Units(), scope="global", sparsity=0.3),
    "freeze erk": freezing("erk"),
    "freeze unit": freezing("unit"),
    "magnitude": ramping("magnitude", "erk"),
    "saliency": ramping("saliency", "leaf"),
    "movement global": ramping("movement", "global"),
    "blocks": ramping("magnitude", "leaf", Blocks(2, 3)),
    "units": ramping("saliency", "erk", Units()),
    "rigl": moving,
}
# Of each layout, the choices without a marker.
FAST = {
    "first": ("prune erk",),
    "second": ("prune n of m",),
    "experts": ("freeze unit",),
    "apart": ("freeze erk",),
}
CASES = [
    pytest.param(name, layout, marks=[] if name in FAST[layout] else [pytest.mark.slow])
    for layout in LAYOUTS
    for name in CHOICES
]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_layers_of_a_stack_have_the_masks_of_the_unrolled_model(name, layout):
    """Choose from scores without ties, so that the order of leaves plays no part."""
    params, scores = unrolled(layout, 0), unrolled(layout, 1)
    alone, of_stacks = axes_of(layout)
    model, stacks = (params, scores), (stacked(layout, params), stacked(layout, scores))

    @jax.jit
    def choose(model, stacks):
        return CHOICES[name](*model, alone), CHOICES[name](*stacks, of_stacks)

    wanted, got = jax.tree.map(np.asarray, choose(model, stacks))
    for one, other in zip(wanted, got, strict=True):
        support.assert_same_bits(split(layout, other), one)
        assert any(leaf.any() for leaf in jax.tree.leaves(other))
        assert not all(leaf.all() for leaf in jax.tree.leaves(other))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stack_has_the_sparsities_of_the_unrolled_model(layout):
    """Give layers of one shape one density, computed from the shape of a layer; traced or not."""
    params, (alone, of_stacks) = unrolled(layout, 0), axes_of(layout)
    stacks = stacked(layout, params)

    def fractions(sparsity):
        wanted = erk_sparsity(params, sparsity, axes=alone)
        return wanted, erk_sparsity(stacks, sparsity, axes=of_stacks)

    for sparsity, call in ((0.3, fractions), (0.9, fractions), (0.55, jax.jit(fractions))):
        wanted, got = call(sparsity)
        assert all(layer == got for layer in wanted.values())
    layer = params["layer0"]
    density = {name: (1 - got[name]) * leaf.size / sum(leaf.shape) for name, leaf in layer.items()}
    np.testing.assert_allclose(list(density.values()), density["up"], rtol=1e-5)


def test_the_count_of_zeros_is_exact_up_to_half_the_layers_of_one_shape():
    """Keep totals exact if the shapes of layers differ, for any remainder of the rounding."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        shapes = rng.integers(1, 9, (rng.integers(1, 6), 3))
        params = {str(i): np.zeros(shape, np.float32) for i, shape in enumerate(shapes)}
        axes = dict.fromkeys(params, KERNEL(1, 2, 0))
        sparsity = float(rng.integers(1001) / 1000)
        fractions = erk_sparsity(params, sparsity, axes=axes)
        assert all(0 <= fraction <= 1 for fraction in fractions.values())
        zeros = sum(round(fractions[name] * leaf.size) for name, leaf in params.items())
        total = sum(leaf.size for leaf in params.values())
        numbers = {}
        for layers, *layer in shapes.tolist():
            numbers[tuple(layer)] = numbers.get(tuple(layer), 0) + layers
        assert abs(zeros - nearest_count(sparsity, total)) <= max(numbers.values()) / 2


def test_ties_keep_the_earlier_entry_of_each_layer():
    """With equal scores, keep the same number of entries in each layer."""
    w = np.ones((2, 3, 4), np.float32)
    for axes, inside in ((KERNEL(1, 2, 0), (1, 2)), (KERNEL(0, 1, 2), (0, 1))):
        choose = functools.partial(prune, sparsity=0.5, scope="leaf", axes=axes)
        pruned = np.asarray(jax.jit(lambda w, choose=choose: choose(w, MASKS.init(w))[0])(w))
        (copies,) = axes.batch_axis
        layers = np.moveaxis(pruned, copies, 0).reshape(w.shape[copies], -1)
        size = layers.shape[1]
        assert (layers[:, : size - size // 2] == 1).all()
        assert (layers[:, size - size // 2 :] == 0).all()
        assert pruned.sum(axis=inside).tolist() == [size - size // 2] * len(layers)


def test_random_masks_of_layers_are_uniform_and_independent():
    """Keep each pair of entries, of one layer or of two layers, as often as chance does."""
    w = jnp.ones((2, 2, 3))
    options = {"criterion": "random", "axes": KERNEL(0, 2, 1)}

    @jax.jit
    @jax.vmap
    def masks(key):
        _, state = prune(w, MASKS.init(w), 0.5, key=key, **options)
        first = optperm.rigl(SGD, 0.5, end=200, key=key, axes=options["axes"]).init(w)
        return state.mask, first.mask

    for found in map(np.asarray, masks(jax.random.split(jax.random.key(0), 2000))):
        assert (found.sum(axis=(1, 3)) == 3).all()
        layers = found.transpose(0, 2, 1, 3).reshape(2000, 12).astype(float)
        pairs = layers.T @ layers / 2000
        # Within a layer 3 of 6 entries, without replacement; between layers independently.
        wanted = np.where(np.kron(np.eye(2), np.ones((6, 6))), 0.2, 0.25)
        np.fill_diagonal(wanted, 0.5)
        np.testing.assert_allclose(pairs, wanted, atol=5 * 0.5 / np.sqrt(2000))


def test_a_gradient_of_zero_moves_no_mask_of_its_layer():
    """Move the weights of the other layers of the stack."""
    w = support.normal((6, 3, 5))
    tx = optperm.rigl(SGD, 0.5, end=20, every=1, axes=KERNEL(0, 2, 1))

    @jax.jit
    def move(w):
        start = tx.init(w)._replace(count=jnp.int32(1))
        _, state = tx.update(w.at[:, 1].set(0.0), start, w)
        return start.mask, state.mask

    before, after = map(np.asarray, move(w))
    assert (after != before).any(axis=(0, 2)).tolist() == [True, False, True]
    assert (after.sum(axis=(0, 2)) == 15).all()


def test_a_layer_that_a_global_choice_removes_is_named():
    scales = np.array([[1.0], [0.01]], np.float32)
    params = {"w": scales * support.normal((4, 2, 5))}
    with pytest.warns(UserWarning, match=r"all weights of w\[1\] are zero"):
        prune(params, MASKS.init(params), 0.5, scope="global", axes={"w": KERNEL(0, 2, 1)})


def scanned_model():
    """Return params as linen's scan makes them, with the layers on the second axis of kernels."""
    layers = {
        "norm": {"scale": np.ones((8, 3), np.float32)},
        "attn": {
            "query": {"kernel": support.normal((8, 3, 2, 4))},
            "out": {"kernel": support.normal((2, 3, 4, 8), 1)},
        },
        "up": {"kernel": support.normal((8, 3, 16), 2), "bias": np.ones((16, 3), np.float32)},
    }
    params = {
        "layers": layers,
        "wte": support.normal((10, 8), 3),
        "head": {"kernel": support.normal((8, 10), 4)},
        "ln_f": {"scale": np.ones(8, np.float32)},
    }
    return jax.device_put(params)


def test_only_kernels_are_sparse_by_default():
    """Prune no embedding, norm or bias of a scanned model, with any method."""
    params = scanned_model()
    axes = optperm.leaf_axes(params)
    wanted = jax.tree.map(lambda own: own.kind == "kernel", axes)
    assert sum(jax.tree.leaves(wanted)) == 4
    tx = optperm.prune_gradually(SGD, 0.5, 1.0, every=1)

    @jax.jit
    def choose(params):
        states = (
            prune(params, MASKS.init(params), 0.5)[1],
            freeze(MASKS.init(params), 0.5, scores=params),
            tx.update(params, tx.init(params), params)[1],
            optperm.rigl(SGD, 0.5, end=200).init(params),
        )
        return [state.mask for state in states], keep_top(params, 0.5)

    masks, top = jax.tree.map(np.asarray, choose(params))
    # A wrapper has masks for sparse leaves alone.
    for mask, is_part in zip(masks, (False, False, True, True), strict=True):
        is_leaf = lambda node: isinstance(node, optax.MaskedNode)  # noqa: E731
        leaves = jax.tree.leaves(mask, is_leaf=is_leaf)
        assert is_part == any(map(is_leaf, leaves))
        found = [not is_leaf(leaf) and not leaf.all() for leaf in leaves]
        assert found == jax.tree.leaves(wanted)
    fractions = erk_sparsity(params, 0.5)
    assert jax.tree.map(lambda fraction: fraction > 0, fractions) == wanted
    assert jax.tree.map(lambda leaf: bool((leaf == 0).any()), top) == wanted


def test_include_makes_other_leaves_sparse_too():
    """Rank an embedding as a kernel, and each entry of a layer's bias."""
    params = scanned_model()
    include = lambda p: jax.tree.map(lambda leaf: leaf.shape in ((10, 8), (16, 3)), p)  # noqa: E731

    @jax.jit
    def choose(params):
        options = {"sparsity": 0.5, "include": include, "scope": "leaf"}
        return [
            prune(params, MASKS.init(params), structure=structure, **options)[0]
            for structure in (None, Units())
        ]

    entries, units = jax.tree.map(np.asarray, choose(params))
    assert (entries["wte"] == 0).sum() == 40
    assert (entries["layers"]["up"]["bias"] == 0).sum(axis=0).tolist() == [8, 8, 8]
    zeros = units["wte"] == 0
    assert zeros.all(axis=0).sum() == 4
    assert (zeros == zeros.all(axis=0)).all()


@pytest.mark.parametrize(
    ("include", "options", "says"),
    [
        ("bias", {"structure": NOfM(2, 4), "sparsity": None}, r"last input axis is divisible by 4"),
        ("bias", {"structure": Blocks(2, 2)}, r"a leaf with inputs and outputs"),
        ("bias", {"scope": "unit"}, r"scope 'unit' needs a leaf with inputs"),
        ("gate", {"structure": Units()}, r"a leaf with outputs, but got .*\(3, 4, 5\) \(other"),
        ("gate", {"structure": NOfM(1, 2), "sparsity": None}, r"\['gate'\] of shape \(3, 4, 5\)"),
    ],
)
def test_a_leaf_without_the_axes_of_a_structure_is_refused_by_name(include, options, says):
    params = {"kernel": jnp.ones((8, 6)), "bias": jnp.ones(6), "gate": jnp.ones((3, 4, 5))}
    options = {"sparsity": 0.5, "include": {name: name == include for name in params}} | options
    for call in (
        lambda: prune(params, MASKS.init(params), **options),
        lambda: keep_top(params, **options),
    ):
        with pytest.raises(ValueError, match=says + r"|" + include) as error:
            call()
        assert include in str(error.value)
        assert "Exclude the leaf with include=, or say what it is with axes=" in str(error.value)


def test_leaves_whose_axes_are_not_known_are_left_alone_with_one_warning():
    """Warn in init of a wrapper and in a call, and not if axes or include are given, nor if traced."""
    params = {"kernel": jnp.ones((8, 6)), "gate": jnp.ones((3, 4, 5))}
    gradual = functools.partial(optperm.prune_gradually, SGD, 0.5, 1.0)
    rigl = functools.partial(optperm.rigl, SGD, 0.5, end=200)
    for name, call in (
        ("prune_gradually", lambda **given: gradual(**given).init(params)),
        ("rigl", lambda **given: rigl(**given).init(params)),
        ("prune", lambda **given: prune(params, MASKS.init(params), 0.5, **given)),
        ("freeze", lambda **given: freeze(MASKS.init(params), 0.5, scores=params, **given)),
        ("keep_top", lambda **given: keep_top(params, 0.5, **given)),
    ):
        with pytest.warns(UserWarning, match=rf"^{name} leaves \['gate'\] alone") as said:
            call()
        assert len(said) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call(axes=optperm.leaf_axes(params))
            call(include={"kernel": True, "gate": False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for traced in (gradual().init, rigl().init, lambda p: keep_top(p, 0.5)):
            jax.eval_shape(traced, params)
        prune(params, MASKS.init(params), 0.0)


@pytest.mark.parametrize("kind", support.every_night(("plain", "linen", "nnx"), ["plain"]))
def test_a_part_of_a_stack_has_the_masks_of_the_whole_with_the_axes_of_the_whole(kind):
    """Refuse a part that does not show that it is stacked, and take the tree of axes of all params."""
    plain = scanned_model()
    params = {
        "plain": lambda leaf: leaf,
        "linen": lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim),
        "nnx": nnx.Param,
    }[kind]
    params = jax.tree.map(params, plain)
    params = nnx.State(params) if kind == "nnx" else params
    axes = optperm.leaf_axes(params)
    mask = jax.tree.map(lambda leaf: leaf.ndim > 2, params)
    for make in (
        functools.partial(optperm.prune_gradually, SGD, 0.5, 1.0, every=1, scope="leaf"),
        functools.partial(optperm.rigl, SGD, 0.5, end=200),
    ):
        if kind == "plain":
            with pytest.raises(ValueError, match=r"no leaf is a kernel\. .*up/kernel .*\(other\)"):
                optax.masked(make(), mask).init(params)
        tx = optax.masked(make(axes=axes), mask)
        step = jax.jit(lambda params, tx=tx: tx.update(params, tx.init(params), params)[1])
        found = jax.tree.map(np.asarray, jax.tree.leaves(step(params).inner_state.mask))
        assert [leaf.shape for leaf in found] == [(2, 3, 4, 8), (8, 3, 2, 4), (8, 3, 16)]
        of_layers = [leaf.sum(axis=(0, 2, 3)[: leaf.ndim - 1]).tolist() for leaf in found]
        assert all(len(set(numbers)) == 1 for numbers in of_layers)
        assert abs(sum(numbers[0] for numbers in of_layers) - 128) <= 1

    @jax.jit
    def choose(params):
        masks = optax.masked(MASKS, mask).init(params)
        return freeze(masks, 0.5, scores=params, scope="leaf", axes=axes).inner_state.mask

    found = jax.tree.leaves(choose(params))
    assert [np.asarray(leaf).sum() for leaf in found] == [96, 96, 192]


@pytest.mark.parametrize(
    ("method", "kind"),
    support.every_night(
        itertools.product(("prune_gradually", "rigl"), (AxisType.Auto, AxisType.Explicit)),
        [("prune_gradually", AxisType.Auto)],
    ),
)
def test_layers_sharded_over_devices_are_chosen_in_place(method, kind):
    """Make the masks of whole stacks, and move a few numbers between devices for each layer."""
    w = {"first": support.normal((4, 8, 64)), "second": support.normal((16, 4, 64), 1)}
    axes = {"first": KERNEL(1, 2, 0), "second": KERNEL(0, 2, 1)}
    specs = {"first": P("x", None, "y"), "second": P("y", "x")}
    tx = {
        "prune_gradually": optperm.prune_gradually(SGD, 0.5, 1.0, every=1, axes=axes),
        "rigl": optperm.rigl(SGD, 0.5, end=99, every=1, axes=axes),
    }[method]

    def choose(params):
        start = tx.init(params)._replace(count=jnp.int32(1))
        _, state = tx.update(params, start, params)
        return start.mask, state.mask

    wanted = jax.tree.map(np.asarray, jax.jit(choose)(w))
    assert any((wanted[0][name] != wanted[1][name]).any() for name in w)
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = {n: jax.device_put(w[n], NamedSharding(mesh, specs[n])) for n in w}
        program = jax.jit(choose).lower(placed).compile()
        got = program(placed)
    support.assert_same_bits(jax.tree.map(np.asarray, got), wanted)
    for name, mask in got[1].items():
        assert mask.sharding.is_equivalent_to(placed[name].sharding, 3)
    found = replicas.collectives(program.as_text())
    assert max(size for _, size, _ in found) <= 8 * 8


def test_a_report_counts_the_zeros_of_each_leaf():
    """Say what a leaf is, in plain trees, States of nnx and boxes of linen."""
    params = scanned_model()
    pruned = jax.jit(lambda p: prune(p, MASKS.init(p), 0.5, scope="leaf")[0])(params)
    pruned = jax.tree.map(np.asarray, pruned)
    report = optperm.sparsity.sparsity_report(pruned)
    leaves = jax.tree.leaves(pruned)
    assert [leaf.zeros for leaf in report.leaves] == [int((leaf == 0).sum()) for leaf in leaves]
    assert report.zeros == sum(leaf.zeros for leaf in report.leaves) > 0
    assert report.size == sum(leaf.size for leaf in leaves)
    assert {leaf.copies for leaf in report.leaves if "layers" in leaf.name} == {3}
    lines = str(report).splitlines()
    assert len({line.index(line.split()[-1]) for line in lines}) == 1
    kernels = [leaf for leaf in report.leaves if leaf.kind == "kernel"]
    zeros, size = sum(leaf.zeros for leaf in kernels), sum(leaf.size for leaf in kernels)
    assert lines[-2].split() == ["kernels", str(zeros), str(size), "0.5000"]
    for traced in (jax.eval_shape, lambda call, p: call(jax.eval_shape(lambda: p))):
        with pytest.raises(
            TypeError, match=r"^params\['head'\]\['kernel'\] must be an array outside"
        ):
            traced(lambda p: optperm.sparsity.sparsity_report(p).zeros, params)
    boxed = jax.tree.map(lambda leaf: nn.Partitioned(leaf, (None,) * leaf.ndim), pruned)
    state = nnx.State(jax.tree.map(nnx.Param, pruned))
    for given in (boxed, state):
        assert [leaf[1:] for leaf in optperm.sparsity.sparsity_report(given).leaves] == [
            leaf[1:] for leaf in report.leaves
        ]
