"""Every transformation on replicas, under each mapping, and on sharded params: it trains as alone."""

import contextlib
import functools
import itertools
import math
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
from jax.tree_util import DictKey
from transformations import GATHERED, ordinal

import optperm
from optperm.core.mapped_axes import mark_varying

# --- replicas: a table of mappings -------------------------------------------------------------

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
    """Return the gradient over the examples of all replicas, with what is asked for of all of them."""
    e = optperm.evaluate(loops.linear_loss, params, batch, axis_name=axis_name)
    same = {name: e.extra_args[name] for name in ("value", "grad", "value_fn", "grad_fn")}
    return e.grad, {"full_grad_fn": loops.full_gradient, **same}


def check_one_model(ours, mapping):
    """Assert that four with parts of a batch train as one with all of it, and hold the same bits."""
    tx, params = ours.make(), support.random_params()
    batches = np.arange(12.0, dtype=np.float32).reshape(3, 4)

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
    tx, batches = ours.make(), jnp.stack(loops.linear_batches(3))

    def run(params, axes=()):
        state = mark_varying(tx.init(params), axes)
        return loops.carry(loops.make_step(tx, loops.linear), params, state, batches)

    is_marked = ours.name in ALIKE_AT_INIT and mapping == "shard_map"
    own = functools.partial(run, axes=(replicas.AXIS,)) if is_marked else run
    together = jax.device_get(replicas.MAPPINGS[mapping](own, 3)(replicas.stack(starts)))
    alone = replicas.stack([*map(jax.jit(run), starts)])
    chex.assert_trees_all_close(together, alone, **TOLERANCES.get(ours.name, USUAL))


# --- sharded params: a table of meshes ---------------------------------------------------------

SHAPES = {"kernel": (16, 24), "bias": (24,)}
# The axes of a kernel that are cut, on four devices in a row or in a square.
SHARDINGS = {
    "both": ((2, 2), P("x", "y"), P("y")),
    "input": ((4,), P("x", None), P(None)),
    "output": ((4,), P(None, "x"), P("x")),
}
MOVES = re.compile(r"= \(?(.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")


@jax.jit
def loss_fn(pulls, params, batch):
    """Return a loss with another pull at each example and at each entry."""
    parts = jax.tree.map(lambda p, g: jnp.sum(p * g), params, pulls)
    return jnp.mean(batch) * sum(jax.tree.leaves(parts), start=jnp.float32(0.0))


def train(ours, place, init):
    """Return updates, state and params after four steps, and the text of the compiled step."""
    tx = ours.make()

    def step(opt_state, params, pulls, batch):
        e = optperm.evaluate(functools.partial(loss_fn, pulls), params, batch)
        extra_args = {"full_grad_fn": lambda p: e.grad, **e.extra_args}
        updates, opt_state = tx.update(e.grad, opt_state, params, **extra_args)
        return updates, opt_state, optperm.apply_updates(params, updates, opt_state)

    params, pulls = (
        place({k: support.normal(shape, seed) for k, shape in SHAPES.items()}) for seed in (0, 9)
    )
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
    """Assert the same bits where nothing is computed, as two compiled programs round apart."""
    if (ours.permutes and not ours.lenient) or ours.is_identity:
        return support.assert_same_bits(actual, expected)
    if not ours.sums_over_params:
        return chex.assert_trees_all_close(actual, expected, rtol=1e-6, atol=1e-6)

    def compare(actual, expected):
        # Sums round by where they are made, by their largest terms.
        largest = np.max(np.abs(expected), initial=1.0)
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5 * largest)

    return jax.tree.map(compare, actual, expected)


def assert_placed(tree, shardings):
    """Assert that the leaves that belong to a parameter are sharded as it is."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        for name, shape in SHAPES.items():
            lead = leaf.ndim - len(shape)
            if path[-1:] == (DictKey(name),) and leaf.shape[lead:] == shape:
                spec = P(*[None] * lead, *shardings[name].spec)
                wanted = NamedSharding(shardings[name].mesh, spec)
                place = f"{jax.tree_util.keystr(path)} is {leaf.sharding}"
                assert leaf.sharding.is_equivalent_to(wanted, leaf.ndim), place


def most_moved(text):
    """Return the largest number of entries that a collective of a program moves to other devices."""
    moved = [dims for shapes in MOVES.findall(text) for dims in re.findall(r"\[([\d,]*)\]", shapes)]
    return max((math.prod(int(n) for n in dims.split(",") if n) for dims in moved), default=0)


def check_sharded(ours, mesh, cut):
    """Assert that results are the unsharded run's, lie where params lie, and that nothing else moves."""
    shape, kernel, bias = SHARDINGS[cut]
    axis_types = (AxisType[mesh],) * len(shape)
    made = jax.make_mesh(shape, ("x", "y")[: len(shape)], axis_types=axis_types)
    shardings = {"kernel": NamedSharding(made, kernel), "bias": NamedSharding(made, bias)}
    place, init = (lambda tree: jax.device_put(tree, shardings)), ours.make().init
    with jax.set_mesh(made) if mesh == "Explicit" else contextlib.nullcontext():
        # The compiler alone decides where zeros lie that are made on automatic axes inside jax.jit.
        results, text = train(ours, place, jax.jit(init) if mesh == "Explicit" else init)
        assert_same(ours, jax.tree.map(np.asarray, results), unsharded(ours))
        assert_placed(results, shardings)
        gathered = GATHERED.get(ours.name, {}).get(cut)
        # What is no larger is of no parameter's size: counts, coefficients, products of snapshots.
        assert most_moved(text) <= (np.prod(SHAPES[gathered]) if gathered else 16)


@pytest.mark.spans("svrg", "mask_elements")
def test_gradients_that_lie_elsewhere_are_moved(ours):
    """They are brought to the params; traced, on an explicit mesh."""
    mesh = jax.make_mesh((4,), ("x",))
    tx, whole = ours.make(), {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    with jax.set_mesh(mesh):
        params, grads = (jax.device_put(whole, NamedSharding(mesh, s)) for s in (P("x"), P()))
        opt_state = jax.eval_shape(tx.init, params)
        updates, _ = jax.eval_shape(tx.update, grads, opt_state, params)
        assert all(leaf.sharding.spec[0] == "x" for leaf in jax.tree.leaves(updates))


# --- the table ---------------------------------------------------------------------------------

MEAN, OWN = (
    {f"{kind} {m}": functools.partial(check, mapping=m) for m in replicas.MAPPINGS}
    for kind, check in (("mean", check_one_model), ("own", check_own_models))
)
MESH = {
    f"mesh {cut} {mesh}": functools.partial(check_sharded, cut=cut, mesh=mesh)
    for cut, mesh in itertools.product(SHARDINGS, ("Explicit", "Auto"))
}
EVERY = MEAN | OWN | MESH


def one_of(checks, ours):
    """Return one of several checks, another one for the next entry."""
    return list(checks.values())[ordinal(ours) % len(checks)]


@pytest.mark.spans("agn", "svrg")
def test_replicas_in_one_placement_train_as_alone(ours):
    one_of(MEAN, ours)(ours)


@pytest.mark.spans("svrg")
def test_sharded_params_in_one_placement_train_as_alone(ours):
    one_of(MESH, ours)(ours)


@pytest.mark.spans("agn")
def test_models_of_their_own_in_checked_shard_map_train_as_each_alone(ours):
    check_own_models(ours, "shard_map")


@pytest.mark.exhaustive
@pytest.mark.parametrize("check", EVERY.values(), ids=EVERY)
def test_params_in_every_placement_train_as_alone(ours, check):
    check(ours)
