"""Sharded params: every transformation on every mesh, with the results of the unsharded run."""

import contextlib
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import ordinal

import optperm

SHAPES = {"kernel": (16, 24), "bias": (24,)}
# The axes of a kernel that are cut, on four devices in a row or in a square.
SHARDINGS = {
    "input": ((4,), P("x", None), P(None)),
    "output": ((4,), P(None, "x"), P("x")),
    "both": ((2, 2), P("x", "y"), P("y")),
}
MESHES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
# What is no larger is not of the size of any parameter: counts, coefficients, snapshots' products.
SMALL = 16
MOVES = re.compile(r"= \(?(.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\(")
PATHS = {"kernel": "['kernel']", "bias": "['bias']"}


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


@jax.jit
def loss_fn(pulls, params, batch):
    """Another pull at each example and at each entry."""
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, pulls)
    return jnp.mean(batch) * sum(jax.tree.leaves(parts), start=jnp.float32(0.0))


def step(tx, opt_state, params, pulls, batch):
    e = optperm.evaluate(functools.partial(loss_fn, pulls), params, batch)
    updates, opt_state = tx.update(
        e.grad, opt_state, params, full_grad_fn=lambda p: e.grad, **e.extra_args
    )
    return updates, opt_state, optperm.apply_updates(params, updates, opt_state)


# The fourth step of a method is like its second; outside of jax.jit each is compiled anew.
STEPS = {"jit": 4, "eager": 2}


def run(ours, place, *, jit_init, how):
    """Updates, state and params after each step; and the text of the compiled step, if there is one."""
    tx = ours.make()
    params, pulls = place(params_of()), place(params_of(seed=9))
    opt_state = (jax.jit(tx.init) if jit_init else tx.init)(params)
    opt_state = ours.prepared(opt_state, params)
    take, text, trail = functools.partial(step, tx), "", []
    for index in range(STEPS[how]):
        batch = np.arange(2.0, dtype=np.float32) + index
        if how == "jit" and not index:
            take = jax.jit(take).lower(opt_state, params, pulls, batch).compile()
            text = take.as_text()
        updates, opt_state, params = take(opt_state, params, pulls, batch)
        trail.append((updates, opt_state, params))
    return trail, text


@functools.cache
def unsharded(ours):
    trail, _ = run(ours, lambda tree: tree, jit_init=True, how="jit")
    return jax.tree.map(np.asarray, trail)


def assert_same(ours, actual, expected):
    """The same bits where nothing is computed, as two compiled programs round apart."""
    if (ours.permutes and not ours.lenient) or ours.is_identity:
        return support.assert_same_bits(actual, expected)
    # Params are of the order of 1, and updates as exact as these: sums round by where they are made.
    tolerance = 1e-5 if ours.sums_over_params else 1e-6
    compare = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    return jax.tree.map(compare, actual, expected)


def misplaced(tree, specs):
    """The leaves that belong to a parameter and are not sharded as it is, with what they are."""
    wrong = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = next((k for k, end in PATHS.items() if jax.tree_util.keystr(path).endswith(end)), "")
        rank = len(SHAPES.get(name, ()))
        if not name or leaf.shape[leaf.ndim - rank :] != SHAPES[name]:
            continue
        wanted = P(*[None] * (leaf.ndim - rank), *specs[name])
        mesh = getattr(leaf.sharding, "mesh", None)
        if mesh is None or not leaf.sharding.is_equivalent_to(
            NamedSharding(mesh, wanted), leaf.ndim
        ):
            wrong.append((jax.tree_util.keystr(path), str(leaf.sharding)))
    return wrong


def moved_across_devices(text, limit):
    """The collectives of a program that move more entries than that to other devices."""
    found = []
    for shapes, name in MOVES.findall(text):
        sizes = [
            int(np.prod([int(n) for n in dims.split(",") if n]))
            for dims in re.findall(r"\[([\d,]*)\]", shapes)
        ]
        if max(sizes, default=0) > limit:
            found.append((name, shapes))
    return found


def check_sharded(ours, mesh, cut, how):
    """Assert that results are the unsharded run's, lie where params lie, and that nothing else moves."""
    shape, kernel, bias = SHARDINGS[cut]
    specs = {"kernel": kernel, "bias": bias}
    made = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(MESHES[mesh],) * len(shape))

    def place(tree):
        return {k: jax.device_put(leaf, NamedSharding(made, specs[k])) for k, leaf in tree.items()}

    with jax.set_mesh(made) if mesh == "explicit" else contextlib.nullcontext():
        # The compiler alone decides where zeros lie that are made on automatic axes inside jax.jit.
        trail, text = run(ours, place, jit_init=how == "jit" and mesh == "explicit", how=how)
        results = trail[-1]
        expected = unsharded(ours)[len(trail) - 1]
        assert_same(ours, jax.tree.map(np.asarray, results), expected)
        assert not misplaced(results, specs)
        gathered = ours.may_gather.get(cut)
        assert not moved_across_devices(text, np.prod(SHAPES[gathered]) if gathered else SMALL)


def in_turn(ours, values, shift=0):
    """One of several values, another one for the next entry."""
    return list(values)[(ordinal(ours) + shift) % len(values)]


@pytest.mark.spans("sgperm", "laperm", "agn", "svrg", "mandt_sgd", "mask_elements")
def test_params_cut_along_both_axes_train_compiled_as_whole_ones(ours):
    check_sharded(ours, in_turn(ours, MESHES), "both", "jit")


@pytest.mark.entries
def test_sharded_params_train_outside_of_jit_as_whole_ones(ours):
    check_sharded(ours, in_turn(ours, MESHES, 1), in_turn(ours, SHARDINGS), "eager")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("mesh", "cut", "how"), [*itertools.product(MESHES, SHARDINGS, STEPS)])
def test_sharded_params_train_on_every_mesh_as_whole_ones(ours, mesh, cut, how):
    check_sharded(ours, mesh, cut, how)


@pytest.mark.spans("sgperm", "mask_elements")
@pytest.mark.parametrize("mesh", support.every_night(MESHES, ["explicit"]))
def test_params_on_other_devices_than_the_state_are_refused(ours, mesh):
    """By JAX. Where a step combines no arrays of the state with params, updates follow the params."""
    devices = jax.devices()
    here, there = (
        jax.sharding.Mesh(np.array(some), ("x",), axis_types=(MESHES[mesh],))
        for some in (devices[:4], devices[4:8])
    )
    tx = ours.make()
    params, moved = (
        jax.device_put(params_of(), NamedSharding(where, P("x"))) for where in (here, there)
    )
    opt_state = tx.init(params)
    refused = None
    with jax.set_mesh(there):
        try:
            updates, _ = tx.update(moved, opt_state, moved)
        except ValueError as error:
            refused = str(error)
    if refused is not None:
        assert "devices" in refused
        assert ours.knows != "nothing" or ours.has_own_shapes
        return
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(moved), strict=True)
    assert all(leaf.sharding.is_equivalent_to(other.sharding, leaf.ndim) for leaf, other in pairs)


def test_gradients_that_lie_elsewhere_are_moved(ours):
    """They are brought to the params; traced, on an explicit mesh."""
    mesh = jax.make_mesh((4,), ("x",))
    tx, whole = ours.make(), params_of()
    with jax.set_mesh(mesh):
        params = jax.device_put(whole, NamedSharding(mesh, P("x")))
        grads = jax.device_put(whole, NamedSharding(mesh, P()))
        opt_state = jax.eval_shape(tx.init, params)
        updates, _ = jax.eval_shape(tx.update, grads, opt_state, params)
        assert all(leaf.sharding.spec[0] == "x" for leaf in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    ("mesh", "criterion"),
    support.every_night(
        itertools.product(MESHES, ["magnitude", "random"]), [("explicit", "random")]
    ),
)
def test_pruning_sharded_params(mesh, criterion):
    """It chooses what it chooses of whole ones, and leaves everything where it lies."""
    made = jax.make_mesh((4,), ("x",), axis_types=(MESHES[mesh],))
    specs = {"kernel": P(None, "x"), "bias": P("x")}

    def pruned(params):
        opt_state = optperm.mask_elements().init(params)
        key = jax.random.key(0)
        options = {"criterion": criterion, "key": key, "scope": "leaf", "include": True}
        params, opt_state = optperm.sparsity.prune(params, opt_state, 0.3, **options)
        return params, optperm.sparsity.freeze(
            opt_state, 0.6, scores=params, scope="global", include=True
        )

    expected = pruned(params_of())
    with jax.set_mesh(made):
        params = {
            k: jax.device_put(x, NamedSharding(made, specs[k])) for k, x in params_of().items()
        }
        results = pruned(params)
    support.assert_same_bits(jax.tree.map(np.asarray, results), jax.tree.map(np.asarray, expected))
    assert mesh == "auto" or not misplaced(results, specs)
