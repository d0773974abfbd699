"""Every transformation on replicas, under each mapping, and on sharded params: it trains as alone."""

import contextlib
import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
import replicas
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from transformations import ordinal

import optperm
from optperm.core.mapped_axes import mark_varying

# --- replicas: a table of mappings -------------------------------------------------------------

STEPS = 3
# Their states begin with parts that the checked mode of shard_map sees to be alike on all replicas, and
# that are not after a step: a scan over them needs `jax.lax.pcast(state, axis, to="varying")` first.
ALIKE_AT_INIT = {
    *("dim_reduce", "dim_reduce-mindspore", "twa", "dldr", "dldr-twa"),
    *("constant_sgd", "mandt_sgd", "sgld", "sghmc"),
}
# Constant SGD divides its probes of the correlation by standard deviations of two examples, which may be
# small: rounding then shows in the fourth digit of a probe, a vector of length 1, and of its quotient.
TOLERANCES = {"constant_sgd": {"rtol": 1e-4, "atol": 1e-4}}
USUAL = {"rtol": 1e-5, "atol": 1e-6}


def mean_gradient(params, batch, axis_name=replicas.AXIS):
    """The gradient over the examples of all replicas, with what is asked for of all of them."""
    e = optperm.evaluate(loops.linear_loss, params, batch, axis_name=axis_name)
    full_grad_fn = lambda params: jax.grad(loops.linear_loss)(params, jnp.arange(5.0))  # noqa: E731
    same = {name: e.extra_args[name] for name in ("value", "grad", "value_fn", "grad_fn")}
    return e.grad, {"full_grad_fn": full_grad_fn, **same}


def check_one_model(ours, mapping):
    """Assert that four with parts of a batch train as one with all of it, and hold the same bits."""
    tx, params = ours.make(), support.random_params()
    batches = np.arange(4.0 * STEPS, dtype=np.float32).reshape(STEPS, 4)

    def train(shared, batches, axis_name=replicas.AXIS):
        evaluate = functools.partial(mean_gradient, axis_name=axis_name)
        return loops.carry(loops.make_step(tx, evaluate), *shared, batches), ()

    shared = params, ours.prepared(tx.init(params), params)
    got, _ = replicas.share(train, mapping, 4)(shared, batches.T[:, :, None])
    got = jax.device_get(got)
    expected, _ = jax.jit(functools.partial(train, axis_name=None))(shared, batches)
    for index in range(4):
        support.assert_same_bits(replicas.take(got, index), replicas.take(got, 0))
    chex.assert_trees_all_close(replicas.take(got, 0), expected, **TOLERANCES.get(ours.name, USUAL))


def check_own_models(ours, mapping):
    """Assert that three, from `init` to the end of a scan in the mapped function, train as alone."""
    starts = [support.random_params(seed) for seed in range(3)]
    tx, batches = ours.make(), jnp.stack(loops.linear_batches(STEPS))

    def run(params, axes=()):
        state = mark_varying(tx.init(params), axes)
        return loops.carry(loops.make_step(tx, loops.linear), params, state, batches)

    is_marked = ours.name in ALIKE_AT_INIT and mapping == "shard_map"
    own = functools.partial(run, axes=(replicas.AXIS,)) if is_marked else run
    together = jax.device_get(replicas.MAPPINGS[mapping](own, 3)(replicas.stack(starts)))
    alone = jax.jit(run)
    for index, params in enumerate(starts):
        one = replicas.take(together, index)
        tolerance = TOLERANCES.get(ours.name, USUAL)
        chex.assert_trees_all_close(one, jax.device_get(alone(params)), **tolerance)


# --- sharded params: a table of meshes ---------------------------------------------------------

SHAPES = {"kernel": (16, 24), "bias": (24,)}
# The axes of a kernel that are cut, on four devices in a row or in a square.
SHARDINGS = {
    "both": ((2, 2), P("x", "y"), P("y")),
    "input": ((4,), P("x", None), P(None)),
    "output": ((4,), P(None, "x"), P("x")),
}
MESHES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
# What is no larger is not of the size of any parameter: counts, coefficients, snapshots' products.
SMALL = 16
# For how a kernel is cut, the largest parameter that the update has to gather then: to permute a weight
# vector, to factorize a matrix, or to move the exponents of groups of entries.
_OF_VECTORS = {"input": "kernel", "both": "kernel", "output": "bias"}
GATHERED = {
    "sgperm": _OF_VECTORS,
    "permute_by_cycles": _OF_VECTORS,
    "laperm": _OF_VECTORS,
    "low_rank-svd": {"input": "kernel", "both": "kernel"},
    "quantize_state": {"both": "kernel"},
    "quantize_state-4": {"both": "kernel"},
}
MOVES = re.compile(r"= \(?(.*?) (all-gather|all-to-all|collective-permute)(?:-start)?\(")


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.float32(rng.normal(size=shape)) for name, shape in SHAPES.items()}


@jax.jit
def loss_fn(pulls, params, batch):
    """Another pull at each example and at each entry."""
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, pulls)
    return jnp.mean(batch) * sum(jax.tree.leaves(parts), start=jnp.float32(0.0))


def train(ours, place, init):
    """Updates, state and params after each of four steps, and the text of the compiled step."""
    tx = ours.make()

    def step(opt_state, params, pulls, batch):
        e = optperm.evaluate(functools.partial(loss_fn, pulls), params, batch)
        updates, opt_state = tx.update(
            e.grad, opt_state, params, full_grad_fn=lambda p: e.grad, **e.extra_args
        )
        return updates, opt_state, optperm.apply_updates(params, updates, opt_state)

    params, pulls = place(params_of()), place(params_of(seed=9))
    opt_state = ours.prepared(init(params), params)
    batches = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    take = jax.jit(step).lower(opt_state, params, pulls, batches[0]).compile()
    for batch in batches:
        updates, opt_state, params = take(opt_state, params, pulls, batch)
    return (updates, opt_state, params), take.as_text()


@functools.cache
def unsharded(ours):
    results, _ = train(ours, lambda tree: tree, jax.jit(ours.make().init))
    return jax.tree.map(np.asarray, results)


def assert_same(ours, actual, expected):
    """The same bits where nothing is computed, as two compiled programs round apart."""
    if (ours.permutes and not ours.lenient) or ours.is_identity:
        return support.assert_same_bits(actual, expected)
    if not ours.sums_over_params:
        return support.assert_close(actual, expected, rtol=1e-6, atol=1e-6)

    def compare(actual, expected):
        # Sums round by where they are made, by their largest terms.
        largest = np.max(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * largest)

    return jax.tree.map(compare, actual, expected)


def misplaced(tree, specs):
    """The leaves that belong to a parameter and are not sharded as it is, with what they are."""
    wrong = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        place = jax.tree_util.keystr(path)
        name = next((name for name in SHAPES if place.endswith(f"['{name}']")), "")
        rank = len(SHAPES.get(name, ()))
        if not name or leaf.shape[leaf.ndim - rank :] != SHAPES[name]:
            continue
        wanted = P(*[None] * (leaf.ndim - rank), *specs[name])
        mesh = getattr(leaf.sharding, "mesh", None)
        if mesh is None or not leaf.sharding.is_equivalent_to(
            NamedSharding(mesh, wanted), leaf.ndim
        ):
            wrong.append((place, str(leaf.sharding)))
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


def check_sharded(ours, mesh, cut):
    """Assert that results are the unsharded run's, lie where params lie, and that nothing else moves."""
    shape, kernel, bias = SHARDINGS[cut]
    specs = {"kernel": kernel, "bias": bias}
    made = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=(MESHES[mesh],) * len(shape))

    def place(tree):
        return {k: jax.device_put(leaf, NamedSharding(made, specs[k])) for k, leaf in tree.items()}

    init = ours.make().init
    with jax.set_mesh(made) if mesh == "explicit" else contextlib.nullcontext():
        # The compiler alone decides where zeros lie that are made on automatic axes inside jax.jit.
        results, text = train(ours, place, jax.jit(init) if mesh == "explicit" else init)
        assert_same(ours, jax.tree.map(np.asarray, results), unsharded(ours))
        assert not misplaced(results, specs)
        gathered = GATHERED.get(ours.name, {}).get(cut)
        assert not moved_across_devices(text, np.prod(SHAPES[gathered]) if gathered else SMALL)


@pytest.mark.spans("svrg", "mask_elements")
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


# --- the table ---------------------------------------------------------------------------------

MEAN, OWN, MESH = (
    {m: functools.partial(check_one_model, mapping=m) for m in replicas.MAPPINGS},
    {m: functools.partial(check_own_models, mapping=m) for m in replicas.MAPPINGS},
    {
        f"{cut} {mesh}": functools.partial(check_sharded, cut=cut, mesh=mesh)
        for cut, mesh in itertools.product(SHARDINGS, MESHES)
    },
)


def check_in_turn(ours, checks):
    """Call one of several checks, another one for the next entry."""
    list(checks.values())[ordinal(ours) % len(checks)](ours)


@pytest.mark.spans("sgperm", "agn", "svrg")
def test_replicas_with_a_mean_gradient_train_as_one(ours):
    check_in_turn(ours, MEAN)


@pytest.mark.spans("agn", "mandt_sgd")
def test_models_of_their_own_in_checked_shard_map_train_as_each_alone(ours):
    check_own_models(ours, "shard_map")


@pytest.mark.spans("sgperm", "agn", "svrg")
def test_sharded_params_train_as_whole_ones(ours):
    check_in_turn(ours, MESH)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=f"{kind} {name}")
        for kind, checks in (("mean", MEAN), ("own", OWN), ("mesh", MESH))
        for name, check in checks.items()
    ],
)
def test_params_in_every_placement_train_as_alone(ours, check):
    check(ours)
