"""What each leaf of a model is said to be, against models whose axes are known."""

import dataclasses
import itertools
import json
import pathlib
import re
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from flax import nnx
from optax.contrib import GaLoreDimensionNumbers

import optperm
from optperm import LeafAxes
from optperm._leaf_axes import OTHER, _elements, resolve_axes, warn_of_others

TREES = json.loads((pathlib.Path(__file__).parent / "model_trees.json").read_text())
LAYERS, DIM, HIDDEN, HEADS = 3, 8, 16, 2


def nested(paths):
    tree = {}
    for path, value in paths.items():
        *above, last = path.split("/")
        node = tree
        for each in above:
            node = node.setdefault(each, {})
        node[last] = value
    return tree


def at(tree, path):
    for each in path.split("/"):
        tree = tree[each]
    return tree.get_value() if isinstance(tree, nnx.Variable) else tree


def as_state(tree):
    return nnx.State(
        {k: as_state(v) if isinstance(v, dict) else nnx.Param(v) for k, v in tree.items()}
    )


FORMS = {
    "shapes": lambda shape: jax.ShapeDtypeStruct(shape, "float32"),
    # Arrays of a model of billions of params, whose entries take no memory.
    "arrays": lambda shape: np.broadcast_to(np.float32(0.0), shape),
    "State": lambda shape: np.broadcast_to(np.float32(0.0), shape),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", TREES)
def test_every_leaf_of_the_models_of_practice_is_what_it_is(name, form):
    params = nested({path: FORMS[form](tuple(said["shape"])) for path, said in TREES[name].items()})
    params = as_state(params) if form == "State" else params
    found = optperm.leaf_axes(params)
    assert jax.tree.structure(found) == jax.tree.structure(params)
    for path, said in TREES[name].items():
        axes = at(found, path)
        assert axes.kind == said["kind"], path
        for role in {"in_axis", "out_axis", "batch_axis"} & said.keys():
            assert getattr(axes, role) == tuple(said[role]), path


class Block(nn.Module):
    """A layer of a transformer, with or without names of axes."""

    is_named: bool = False

    @nn.compact
    def __call__(self, x, _=None):
        def init(*names):
            kernel = nn.initializers.lecun_normal()
            return nn.with_partitioning(kernel, names) if self.is_named else kernel

        h = nn.LayerNorm(name="norm")(x)
        x += nn.MultiHeadDotProductAttention(HEADS, name="attention")(h)
        h = nn.Dense(HIDDEN, name="up", kernel_init=init("embed", "mlp"))(x)
        return x + nn.Dense(DIM, name="down", kernel_init=init("mlp", "embed"))(h), None


class Scanned(nn.Module):
    """Layers that are stacked on any axis."""

    axis: int
    is_named: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, DIM, name="embed")(tokens)
        layers = nn.scan(
            Block,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = layers(self.is_named, name="layers")(x, None)
        return nn.Dense(11, name="lm_head")(nn.LayerNorm(name="final")(x))


class Unrolled(nn.Module):
    """The same layers in a loop."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, DIM, name="embed")(tokens)
        for index in range(LAYERS):
            x, _ = Block(name=f"layer_{index}")(x)
        return nn.Dense(11, name="lm_head")(nn.LayerNorm(name="final")(x))


def shapes_of(model):
    tokens = jnp.zeros((1, 4), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def without_copies(axes, stack):
    """Return the axes of a leaf without the axis of its stack."""

    def shifted(own):
        return tuple(axis - (axis > stack) for axis in own if axis != stack)

    assert stack in axes.batch_axis
    return LeafAxes(axes.kind, *map(shifted, (axes.in_axis, axes.out_axis, axes.batch_axis)))


@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_scanned_layer_is_a_stack_of_the_unrolled_ones(axis, is_named):
    found = optperm.leaf_axes(shapes_of(Scanned(axis, is_named)))
    unrolled = optperm.leaf_axes(shapes_of(Unrolled()))
    if is_named:
        found = jax.tree.map(
            lambda box: box.value if isinstance(box, nn.Partitioned) else box,
            found,
            is_leaf=lambda node: isinstance(node, nn.Partitioned),
        )
    layer = jax.tree.map(lambda axes: without_copies(axes, axis), found.pop("layers"))
    for index in range(LAYERS):
        assert layer == unrolled.pop(f"layer_{index}")
    assert found == unrolled
    query = layer["attention"]["query"]
    assert query == {"kernel": LeafAxes("kernel", 0, (1, 2)), "bias": LeafAxes("bias", (), (0, 1))}
    assert layer["norm"]["scale"] == LeafAxes("scale", (), 0)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, rngs=rngs, decode=False)
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(self.norm(x))


class NnxModel(nnx.Module):
    def __init__(self, rngs, axis):
        @nnx.vmap(in_axes=0, out_axes=axis)
        def make(key):
            return NnxBlock(nnx.Rngs(key))

        self.embed = nnx.Embed(11, DIM, rngs=rngs)
        self.layers = make(jax.random.split(rngs.params(), LAYERS))
        self.norm = nnx.RMSNorm(DIM, rngs=rngs)


@pytest.mark.parametrize("axis", [0, 1])
def test_layers_of_nnx_are_a_stack(axis):
    """What makes them for `nnx.scan` is `nnx.vmap`; a State gives a State of LeafAxes."""
    state = nnx.state(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0), axis)), nnx.Param)
    found = optperm.leaf_axes(state)
    assert isinstance(found, nnx.State)
    plain = resolve_axes(found, state)
    assert plain == resolve_axes(None, state) == resolve_axes(optperm.leaf_axes, state)
    query = without_copies(at(found, "layers/attention/query/kernel"), axis)
    assert query == LeafAxes("kernel", 0, (1, 2))
    assert without_copies(at(found, "layers/attention/out/kernel"), axis).in_axis == (0, 1)
    assert without_copies(at(found, "layers/norm/scale"), axis) == LeafAxes("scale", (), 0)
    assert at(found, "embed/embedding").kind == "embedding"
    assert at(found, "norm/scale") == LeafAxes("scale", (), 0)


def test_names_of_axes_in_variables_tell_the_copies():
    names = ("layers", "expert", "embed", "mlp")
    with nnx.use_eager_sharding(False):
        kernel = nnx.Param(np.zeros((LAYERS, 4, DIM, HIDDEN)), out_sharding=names)
    found = optperm.leaf_axes({"wi": kernel, "wo": nnx.Param(np.zeros((LAYERS, 4, HIDDEN, DIM)))})
    assert at(found, "wi") == LeafAxes("kernel", 2, 3, (0, 1))
    assert at(found, "wo") == OTHER


def test_axes_without_a_name_may_be_copies():
    """A sharding that names only the axes of a mesh hides no stack."""
    with nnx.use_eager_sharding(False):
        kernel = nnx.Param(np.zeros((LAYERS, DIM, HIDDEN)), out_sharding=(None, None, "model"))
    found = optperm.leaf_axes(
        {"up": {"kernel": kernel}, "norm": {"scale": np.zeros((LAYERS, DIM))}}
    )
    assert at(found, "up/kernel") == LeafAxes("kernel", 1, 2, 0)


READING = {
    "sgperm": optperm.sgperm,
    "low_rank": lambda **axes: optperm.low_rank(optax.sgd(1.0), 2, **axes),
}


@pytest.mark.parametrize("make", support.every_night(READING.values(), [optperm.sgperm]))
def test_names_that_an_update_does_not_see_have_to_be_passed(make):
    """nnx.Optimizer gives variables to init, and plain arrays to update."""
    with nnx.use_eager_sharding(False):
        named = nnx.Param(support.normal((4, DIM, HIDDEN)), out_sharding=("expert", "embed", "mlp"))
        dense = nnx.Param(support.normal((DIM, HIDDEN)), out_sharding=("embed", "mlp"))
    params = {"wi": named, "up": dense}
    with pytest.raises(ValueError, match=r"pass axes=optperm\.leaf_axes\(params\)"):
        make().init(params)
    tx = make(axes=optperm.leaf_axes(params))
    plain = nnx.to_pure_dict(nnx.State(params))
    # The state of init comes into the trace as values, whose axes update compares.
    state = nnx.as_pure(jax.jit(tx.init)(params))
    update = jax.jit(lambda p: tx.update(p, state, p)[0])
    assert np.any(update(plain)["wi"])
    jax.eval_shape(make().init, {"up": dense})  # names change nothing


class Mlp(eqx.Module):
    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(DIM)
        self.up = eqx.nn.Linear(DIM, HIDDEN, key=one)
        self.down = eqx.nn.Linear(HIDDEN, DIM, use_bias=False, key=two)


def test_modules_of_equinox_tell_their_axes():

    def make(key):
        keys = jax.random.split(key, LAYERS)
        model = {
            "layers": eqx.filter_vmap(Mlp)(keys),
            "wide": eqx.nn.Conv2d(3, HIDDEN, 3, key=keys[0]),
            "line": eqx.nn.Conv1d(DIM, HIDDEN, 5, key=keys[1]),
            "table": eqx.nn.Embedding(11, DIM, key=keys[2]),
            "cell": eqx.nn.GRUCell(DIM, HIDDEN, key=keys[0]),
        }
        return eqx.filter(model, eqx.is_inexact_array)

    found = optperm.leaf_axes(eqx.filter_eval_shape(make, jax.random.key(0)))
    assert found["layers"].up.weight == LeafAxes("kernel", 2, 1, 0)
    assert found["layers"].down.weight == LeafAxes("kernel", 2, 1, 0)
    assert found["layers"].norm.weight == LeafAxes("scale", (), 1, 0)
    assert found["wide"].weight == LeafAxes("kernel", (1, 2, 3), 0)
    assert found["wide"].bias.kind == found["line"].bias.kind == "bias"
    assert found["wide"].bias.batch_axis == ()
    assert found["line"].weight == LeafAxes("kernel", (1, 2), 0)
    assert found["table"].weight.kind == "embedding"
    assert found["cell"].weight_ih == LeafAxes("kernel", 1, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Named:
    """An array with named axes, as in Haliax."""

    array: Any
    axes: tuple = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class NamedLinear:
    """A layer that names its inputs and outputs, as in Haliax."""

    weight: Any
    In: Any = dataclasses.field(metadata={"static": True})
    Out: Any = dataclasses.field(metadata={"static": True})


class Axis(NamedTuple):
    name: str
    size: int


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_named_axes_tell_inputs_outputs_and_layers_in_any_order(order):
    sizes = Axis("layers", 3), Axis("embed", 8), Axis("heads", 2), Axis("head_size", 4)
    axes = tuple(sizes[i] for i in order)
    weight = Named(np.zeros([axis.size for axis in axes]), axes)
    params = {"proj": NamedLinear(weight, sizes[1], (sizes[2], sizes[3]))}
    (found,) = jax.tree.leaves(optperm.leaf_axes(params))
    place = order.index
    assert found == LeafAxes("kernel", place(1), tuple(sorted((place(2), place(3)))), place(0))


AMBIGUOUS = {
    "three axes": {"w": (4, 5, 6)},
    "experts that no name tells": {"layers/moe/wi": (2, 2, 8, 16), "layers/norm/scale": (2, 8)},
    "four by four matrices": {"moe/kernel": (4, 4, 64, 256), "norm/scale": (64,)},
    "a scanned attention alone": {"query/kernel": (3, 8, 2, 4)},
    "scalars": {"temperature": ()},
    "nothing": {"w": (0, 3)},
}


@pytest.mark.parametrize("shapes", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_what_can_be_read_in_two_ways_is_left_alone(shapes):
    params = nested({path: np.zeros(shape) for path, shape in shapes.items()})
    found = optperm.leaf_axes(params)
    kinds = {path: at(found, path).kind for path in shapes}
    assert {kind for path, kind in kinds.items() if not path.endswith("scale")} == {"other"}


def test_folded_heads_in_a_stack_do_not_hide_it():
    """A bias (layers, d) of a query may also be the bias (heads, head_dim) of one layer."""
    shapes = {"query/kernel": (3, 8, 8), "query/bias": (3, 8), "norm/scale": (3, 8)}
    shapes |= {"up/kernel": (3, 8, 32), "down/kernel": (3, 32, 8)}
    found = optperm.leaf_axes(nested({path: np.zeros(shape) for path, shape in shapes.items()}))
    assert at(found, "query/kernel") == LeafAxes("kernel", 1, 2, 0)
    assert at(found, "query/bias") == LeafAxes("bias", (), 1, 0)


def test_biases_tell_which_of_several_shared_axes_counts_the_layers():
    """A kernel (d, layers, d) and its bias share two axes; without a bias the first counts."""
    for axis in (0, 1):
        kernel, vector = np.insert([8, 8], axis, 3), np.insert([8], axis, 3)
        params = {"kernel": np.zeros(kernel), "bias": np.zeros(vector)}
        assert optperm.leaf_axes(params)["kernel"].batch_axis == (axis,)
        assert optperm.leaf_axes(params)["bias"].batch_axis == (axis,)
    params = {"scale": np.zeros((3, 8)), "w": np.zeros((3, 8, 16))}
    assert optperm.leaf_axes(params)["w"] == LeafAxes("kernel", 1, 2, 0)


PLAIN = {
    "a regression": ({"coef": (10,), "intercept": ()}, {"coef": "bias", "intercept": "other"}),
    "layers of JAX": ({"0/0": (784, 10), "0/1": (10,)}, {"0/0": "kernel", "0/1": "bias"}),
    "one letter": ({"a": (3, 2), "b": (3, 2)}, {"a": "kernel", "b": "kernel"}),
    "Haiku": ({"linear/w": (3, 2), "linear/b": (2,)}, {"linear/w": "kernel", "linear/b": "bias"}),
    "Keras": (
        {"norm/gamma": (3,), "norm/beta": (3,), "table/embeddings": (9, 3)},
        {"norm/gamma": "scale", "norm/beta": "bias", "table/embeddings": "embedding"},
    ),
    "coefficients": ({"beta": (10, 3)}, {"beta": "kernel"}),
    "a convolution by name": ({"conv1": (3, 3, 1, 32)}, {"conv1": "kernel"}),
}


@pytest.mark.parametrize(("shapes", "kinds"), PLAIN.values(), ids=PLAIN)
def test_small_models_of_other_libraries(shapes, kinds):
    found = optperm.leaf_axes(nested({path: np.zeros(shape) for path, shape in shapes.items()}))
    assert {path: at(found, path).kind for path in shapes} == kinds
    assert all(not at(found, path).batch_axis for path in shapes)


def test_a_single_array_is_a_leaf():
    assert optperm.leaf_axes(jnp.ones((2, 3))) == LeafAxes("kernel", 0, 1)
    assert optperm.leaf_axes(jnp.ones(3)).kind == "bias"


KERNEL = LeafAxes("kernel", 1, 2, 0)
MODEL = {
    "moe": {"wi": np.zeros((4, 3, 2)), "bias": np.zeros((4, 2))},
    "head": {"w": np.zeros((3, 5))},
}


def test_what_the_caller_says_comes_first(capsys):
    """A name of several elements before one of one, and a deeper one before a higher one."""
    axes = optperm.leaf_axes(MODEL, **{"moe/wi": KERNEL, "moe": None, "head": None}, show=True)
    assert axes == {"moe": {"wi": KERNEL, "bias": OTHER}, "head": {"w": OTHER}}
    rows = capsys.readouterr().out.splitlines()
    assert optperm.leaf_axes(MODEL, wi=KERNEL, moe=None)["moe"]["wi"] == KERNEL
    deep = {"moe": {"up": {"w": np.zeros((4, 3, 2))}}}
    axes = optperm.leaf_axes(deep, **{"moe/up": KERNEL, "w": None})
    assert axes == {"moe": {"up": {"w": KERNEL}}}
    assert all("as given" in row for row in rows[1:])


WRONG = {
    "unknown": (
        {"gate": KERNEL},
        ValueError,
        r"gate must be an element of a path, one of \['bias', ",
    ),
    "no axes": (
        {"wi": (1, 2)},
        TypeError,
        r"wi, for \['moe'\]\['wi'\] .* optperm.LeafAxes, .* or None",
    ),
    "rank": ({"head": KERNEL}, ValueError, r"head, for \['head'\]\['w'\] with the shape \(3, 5\),"),
    "no role": ({"wi": LeafAxes("kernel", 1, 2)}, ValueError, "give each of its axes one role"),
    "GaLore": ({"w": GaLoreDimensionNumbers(0, 2)}, ValueError, "must name distinct axes of it"),
}


@pytest.mark.parametrize(("overrides", "error", "says"), WRONG.values(), ids=WRONG)
def test_overrides_that_do_not_fit_are_refused_by_leaf(overrides, error, says):
    with pytest.raises(error, match=says):
        optperm.leaf_axes(MODEL, **overrides)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (("matrix",), ValueError, "kind must be one of kernel, embedding, scale, bias, other"),
        (("kernel", -1, 0), ValueError, "in_axis must be at least 0"),
        (("kernel", 0, 0), ValueError, "Each axis must have one role"),
        (("kernel", (0, 0), 1), ValueError, "Each axis must have one role"),
        (("kernel", 0.5, 1), TypeError, "in_axis must be axes of a leaf, integers, got 0.5"),
        (("kernel", False, True), TypeError, "in_axis must be axes of a leaf, integers, got False"),
        (
            ("kernel", (), (0, 1)),
            ValueError,
            "in_axis and out_axis must each name an axis of a kernel",
        ),
        (("bias", 0), ValueError, "in_axis must be empty, because a bias has no inputs"),
    ],
)
def test_axes_that_no_leaf_can_have_are_refused(arguments, error, says):
    with pytest.raises(error, match=says):
        LeafAxes(*arguments)


def test_axes_of_a_method_come_as_tree_function_or_optax_has_them():
    galore = {"w": GaLoreDimensionNumbers(-2, -1), "b": None}
    params = {"w": np.zeros((4, 3, 2)), "b": np.zeros(2)}
    expected = {"w": KERNEL, "b": OTHER}
    assert resolve_axes(galore, params) == expected
    assert resolve_axes(lambda params: {"w": KERNEL, "b": None}, params) == expected
    masked = {"w": params["w"], "b": optax.MaskedNode()}
    assert resolve_axes(expected, masked) == {"w": KERNEL, "b": optax.MaskedNode()}
    with pytest.raises(ValueError, match="axes must be a tree like params"):
        resolve_axes({"w": KERNEL}, params)


def test_many_entries_that_stay_alone_are_warned_of_with_the_line_to_write():
    params = {"moe": {"wi": jnp.zeros((4, 3, 2))}, "w": jnp.zeros((3, 5))}
    with pytest.warns(UserWarning, match=r"low_rank leaves \['moe'\]\['wi'\] alone") as seen:
        warn_of_others("low_rank", params, None)
    line = re.search(r"axes=(optperm\.leaf_axes\(.*\)\})\)", str(seen[0].message))[1]
    found = eval(f"{line})", {"optperm": optperm, "params": params})
    assert found["moe"]["wi"] == KERNEL
    # Who gives axes has said what the leaves are, a few entries do not matter, and scalars have no axes.
    warn_of_others("low_rank", params, found)
    warn_of_others("low_rank", {"w": jnp.zeros((100, 100)), "x": jnp.zeros((2, 2, 2))}, None)
    warn_of_others("low_rank", {"coef": jnp.zeros(3), "intercept": jnp.zeros(())}, None)
    jax.eval_shape(lambda p: warn_of_others("low_rank", p, None), params)


def test_a_leaf_that_is_named_as_a_norm_is_a_scale_and_shows_its_stack():
    """Llama's raw params have no leaf named "scale": a norm of stacked layers is no kernel."""
    layers = {
        "attention_norm": jnp.ones((4, 8)),
        "ln_2": jnp.ones((4, 8)),
        "up": jnp.ones((4, 8, 16)),
    }
    axes = optperm.leaf_axes({"layers": layers, "norm": jnp.ones(8)})
    of_layers = optperm.LeafAxes("scale", (), 1, 0)
    assert axes["layers"]["attention_norm"] == axes["layers"]["ln_2"] == of_layers
    assert axes["norm"] == optperm.LeafAxes("scale", (), 0)
    assert axes["layers"]["up"] == optperm.LeafAxes("kernel", 1, 2, 0)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


# Of each tree: the kind, and the axes of inputs, outputs and copies, of each leaf.
OTHER_LEAVES = ("other", (), (), ())
TABLES = ("emb", "tok_emb", "pos", "pos_embedding", "wte", "wpe")
SEEN_TOGETHER = {
    "a stack that no name shows": (
        {"layers": {"gain": shape(6, 16), "w1": shape(6, 16, 32), "w2": shape(6, 32, 16)}},
        {"layers/gain": OTHER_LEAVES, "layers/w1": OTHER_LEAVES, "layers/w2": OTHER_LEAVES},
    ),
    "stacked pairs": (
        [(shape(6, 16, 32), shape(6, 32)), (shape(6, 32, 4), shape(6, 4))],
        {"0/0": OTHER_LEAVES, "0/1": OTHER_LEAVES, "1/0": OTHER_LEAVES, "1/1": OTHER_LEAVES},
    ),
    "experts within layers": (
        {
            "layers": {
                "experts": {"w_in": shape(6, 8, 64, 256), "b_in": shape(6, 8, 256)},
                "ln": shape(6, 64),
            }
        },
        {
            "layers/experts/w_in": ("kernel", (2,), (3,), (0, 1)),
            "layers/experts/b_in": ("bias", (), (2,), (0, 1)),
            "layers/ln": ("scale", (), (1,), (0,)),
        },
    ),
    "a bias that says where outputs are": (
        {
            "lin": {"weight": shape(4, 8), "bias": shape(8)},
            "up": {"weight": shape(8, 16, 3, 3), "bias": shape(16)},
            "out": {"kernel": shape(4, 16, 64), "bias": shape(64)},
            "square": {"weight": shape(8, 8), "bias": shape(8)},
        },
        {
            "lin/weight": ("kernel", (0,), (1,), ()),
            "up/weight": ("kernel", (0, 2, 3), (1,), ()),
            "out/kernel": ("kernel", (0, 1), (2,), ()),
            "square/weight": ("kernel", (1,), (0,), ()),
        },
    ),
    "names with dots": (
        {
            "conv1.weight": shape(16, 3, 3, 3),
            "conv1.bias": shape(16),
            "fc1.weight": shape(128, 64),
            "fc1.bias": shape(128),
            "tok_emb.weight": shape(100, 64),
        },
        {
            "conv1.weight": ("kernel", (1, 2, 3), (0,), ()),
            "fc1.weight": ("kernel", (1,), (0,), ()),
            "fc1.bias": ("bias", (), (0,), ()),
            "tok_emb.weight": ("embedding", (0,), (1,), ()),
        },
    ),
    "a flattened tree": (
        {
            ("layers", "norm", "scale"): shape(6, 64),
            ("layers", "up", "kernel"): shape(6, 64, 256),
            ("layers", "down", "kernel"): shape(6, 256, 64),
        },
        {
            "layers/norm/scale": ("scale", (), (1,), (0,)),
            "layers/up/kernel": ("kernel", (1,), (2,), (0,)),
        },
    ),
    "heads in a stack": (
        {
            "layers": {
                "ln": shape(6, 64),
                **dict.fromkeys(("wq", "wv"), shape(6, 64, 4, 16)),
                "wo": shape(6, 4, 16, 64),
            }
        },
        {
            "layers/wq": ("kernel", (1,), (2, 3), (0,)),
            "layers/wo": ("kernel", (1, 2), (3,), (0,)),
        },
    ),
    "names of tables": (
        {
            **dict.fromkeys(TABLES, shape(100, 64)),
            **{key: {"w": shape(64, 100)} for key in ("unembed", "patch_embed", "time_embed")},
        },
        {
            **dict.fromkeys(TABLES, ("embedding", (0,), (1,), ())),
            **dict.fromkeys(
                ("unembed/w", "patch_embed/w", "time_embed/w"), ("kernel", (0,), (1,), ())
            ),
        },
    ),
    "queries, keys and values in one einsum": (
        {"attn": {"qkv_einsum": {"w": shape(3, 4, 64, 16)}}},
        {"attn/qkv_einsum/w": ("kernel", (2,), (1, 3), (0,))},
    ),
    "a table of one image": (
        {"pos_embedding": shape(1, 100, 64), "ln": {"scale": shape(64)}},
        {"pos_embedding": ("embedding", (1,), (2,), (0,)), "ln/scale": ("scale", (), (0,), ())},
    ),
    "depthwise": (
        {"dw": {"depthwise_kernel": shape(3, 3, 16, 1), "bias": shape(16)}},
        {"dw/depthwise_kernel": ("kernel", (0, 1), (2, 3), ())},
    ),
}


@pytest.mark.parametrize(("params", "wanted"), SEEN_TOGETHER.values(), ids=SEEN_TOGETHER)
def test_leaves_that_stand_together_tell_what_they_are(params, wanted):
    axes = optperm.leaf_axes(params)
    leaves = jax.tree_util.tree_leaves_with_path(axes)
    found = {"/".join(_elements(path)): dataclasses.astuple(own) for path, own in leaves}
    for name, own in wanted.items():
        assert found[name.replace(".", "/")] == own, name


def test_overrides_name_leaves_of_flattened_trees():
    assert optperm.leaf_axes({"fc.weight": shape(4, 8)}, **{"fc.weight": None}) == {
        "fc.weight": OTHER
    }
    params = {("layers", "up"): shape(2, 3, 4)}
    assert optperm.leaf_axes(params, **{"layers/up": KERNEL}) == {("layers", "up"): KERNEL}
