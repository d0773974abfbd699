"""Leaves of any number, rank, dtype and sharding are masked as each would be by itself."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.sparsity._choice import nearest_count

pytestmark = pytest.mark.usefixtures("lenient")
RAMP = optax.linear_schedule(0.0, 1.0, 2)


def inner():
    """Products with powers of two are exact, in whatever program they stand."""
    return optax.sgd(0.125, momentum=0.5)


METHODS = {
    "rigl": lambda sparsity, **options: optperm.rigl(inner(), sparsity, end=30, every=2, **options),
    "set": lambda sparsity, **options: optperm.rigl(
        inner(), sparsity, end=30, every=2, grow="random", **options
    ),
} | {
    criterion: lambda sparsity, criterion=criterion, **options: optperm.prune_gradually(
        inner(), sparsity, RAMP, every=2, criterion=criterion, **options
    )
    for criterion in ("magnitude", "saliency", "movement")
}
# Leaves of equal shapes, of other shapes, of rank 0, without entries, and of three dtypes.
SHAPES = ((5, 4), (5, 4), (3, 2, 4), (7,), (), (0, 3), (4, 5), (5, 4))
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16)


def make_leaves(num_leaves, seed):
    """Numbers with ties."""
    rng = np.random.default_rng(seed)
    return {
        f"leaf{i:02}": jnp.asarray(
            rng.normal(size=SHAPES[i % len(SHAPES)]).round(1), DTYPES[i % len(DTYPES)]
        )
        for i in range(num_leaves)
    }


def part_of(state, name):
    """The state of one leaf."""

    def choose(tree):
        return {name: tree[name]} if isinstance(tree, dict) and name in tree else tree

    return jax.tree.map(choose, state, is_leaf=lambda node: isinstance(node, dict))


@pytest.mark.parametrize(
    ("name", "num_leaves"),
    support.every_night(
        itertools.product([name for name in METHODS if name != "set"], [0, 1, 16, 48]),
        [("rigl", 16), ("saliency", 0), ("movement", 16)],
    ),
)
def test_each_leaf_is_masked_as_by_itself(name, num_leaves):
    """With a fraction for each leaf, in the steps before and of the second event; SET draws by place."""
    params = make_leaves(num_leaves, seed=0)
    fractions = {key: 0.6 if leaf.ndim else 0.0 for key, leaf in params.items()}
    tx = METHODS[name](fractions or 0.6, include=True)
    state = tx.init(params)
    update, chosen = jax.jit(tx.update), list(params)[: len(SHAPES)]
    alone = {k: jax.jit(METHODS[name](fractions[k], include=True).update) for k in chosen}
    for step in range(3):
        grads = make_leaves(num_leaves, seed=step + 1)
        updates, new = update(grads, state, params)
        for key in chosen:
            one = part_of((grads, state, params), key)
            found = alone[key](*one)
            jax.tree.map(np.testing.assert_array_equal, found, part_of((updates, new), key))
        params, state = optperm.apply_updates(params, updates, new), new
    live = [int(mask.sum()) for mask in jax.tree.leaves(state.mask)]
    assert live == [
        leaf.size - nearest_count(fractions[key], leaf.size) for key, leaf in params.items()
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    support.in_turns(["rigl", "set", "magnitude"], [AxisType.Explicit, AxisType.Auto]),
)
def test_leaves_cut_in_other_ways_are_not_moved(name, kind):
    """Leaves of one shape, each on the mesh in its own way, have the masks of whole ones in an event.

    The collectives, of counts, are far smaller than a part of a leaf.
    """
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
    rng = np.random.default_rng(0)
    specs = {"a": P("x", None), "b": P(None, "y"), "c": P("x", "y"), "d": P("y", "x"), "e": P()}
    params, grads = (
        {key: rng.normal(size=(32, 48)).round(1).astype(np.float32) for key in specs}
        for _ in range(2)
    )
    tx = METHODS[name](0.7)
    state = tx.init(params)._replace(count=jnp.int32(2))

    def update(params, state, grads):
        updates, new = tx.update(grads, state, params)
        return updates, new.mask

    wanted = jax.jit(update)(params, state, grads)
    changed = [np.any(np.asarray(state.mask[key]) != wanted[1][key]) for key in specs]
    assert all(changed)

    def place(tree):
        """The tree on the mesh, with its parts that are like params."""

        def put(node):
            if not (isinstance(node, dict) and "a" in node):
                return node
            return {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in node.items()}

        return jax.tree.map(put, tree, is_leaf=lambda node: isinstance(node, dict))

    with jax.set_mesh(mesh):
        placed = place(params), place(state), place(grads)
        program = jax.jit(update).lower(*placed).compile()
        got = program(*placed)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    for key, mask in got[1].items():
        assert mask.sharding.is_equivalent_to(placed[0][key].sharding, 2)
    sizes = [size for _, size, _ in replicas.collectives(program.as_text())]
    assert sizes
    assert max(sizes) <= 64
