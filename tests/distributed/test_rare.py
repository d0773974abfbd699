"""Replicas under every mapping: results, traffic between devices, and refused arguments."""

import functools

import chex
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.distributed import Compression, Every

SIZE, AXIS = 4, replicas.AXIS
START = {"w": np.float32(np.arange(12.0).reshape(3, 4)), "b": np.float32([1.0, -1.0])}
AGN, DILOCO = (functools.partial(factory, every=3) for factory in (optperm.agn, optperm.diloco))
METHODS = {
    "agn mean": AGN,
    "agn sum": functools.partial(AGN, combine="sum"),
    "agn sequential": functools.partial(AGN, combine="sequential"),
    "agn plan": functools.partial(AGN, every=Every(3, 2, 1)),
    "agn compressed": functools.partial(AGN, compress=Compression(bits=4)),
    "diloco": DILOCO,
    "diloco sequential": functools.partial(DILOCO, combine="sequential"),
    "plan": functools.partial(DILOCO, every=Every(3, 2, 1), mixing=0.5),
    "slices": functools.partial(DILOCO, every=Every(3, 2), fragment_of={"w": [0, 1, 0], "b": 1}),
    "pairs": functools.partial(DILOCO, combine="pairs"),
    "compressed": functools.partial(DILOCO, compress=Compression(bits=4)),
}
# The axes over which replicas are spread in these two.
AXES = {"mesh of two axes": ("host", "device"), "named vmap in shard_map": ("device", "each")}
LAYOUTS = ["pmap", "shard_map", "shard_map unchecked", "vmap in shard_map", *AXES]
LAYOUTS += ["spmd auto", "spmd explicit"]


def loss_fn(params, batch):
    return sum(jnp.sum((p - batch) ** 2) for p in jax.tree.leaves(params))


def layout(name, step):
    """Return the mapped step, and the mesh on which its stacked arguments lie."""
    kind = AxisType.Explicit if "explicit" in name else AxisType.Auto
    mesh, axis = jax.make_mesh((SIZE,), (AXIS,), axis_types=(kind,)), AXIS
    if name in replicas.MAPPINGS:
        return replicas.MAPPINGS[name](step, SIZE), mesh
    if "spmd" in name:
        return jax.jit(jax.vmap(step, axis_name=AXIS, spmd_axis_name=AXIS)), mesh
    if name == "mesh of two axes":
        mesh = jax.make_mesh((2, 2), AXES[name], axis_types=(kind, kind))
        return replicas.map_over(mesh, step, check_vma=False), mesh
    rows = jax.vmap(step)
    if name == "named vmap in shard_map":
        axis, within = AXES[name]
        rows, mesh = jax.vmap(step, axis_name=within), jax.make_mesh((2,), (axis,), (kind,))
    options = {"in_specs": P(axis), "out_specs": P(axis), "check_vma": name not in AXES}
    return jax.jit(jax.shard_map(rows, mesh=mesh, **options)), mesh


# Pairs are of one axis.
CELLS = [(a, b) for a in LAYOUTS for b in METHODS if b != "pairs" or a not in AXES]
USUAL = [("vmap in shard_map", "diloco")]
SLOW = [("spmd auto", "agn mean"), ("shard_map", "slices"), ("mesh of two axes", "agn sequential")]
SLOW += [("named vmap in shard_map", "plan"), ("spmd explicit", "pairs")]
SLOW += [
    ("shard_map", "agn plan"),
    ("spmd explicit", "agn compressed"),
    ("pmap", "diloco sequential"),
]


@pytest.mark.parametrize(("name", "method"), support.every_night(CELLS, USUAL, slow=SLOW))
def test_counted_steps_exchange_within_a_conditional(name, method):
    """Outside conditionals, collectives move only counts; the params equal a plain vmap's."""
    targets = np.float32(np.random.default_rng(0).normal(size=(4, SIZE)))

    def four_steps(axes):
        tx = METHODS[method](optax.sgd(0.01), axis_name=axes)
        return functools.partial(loops.carry, loops.make_step(tx, loops.gradient(loss_fn)))

    mapped, mesh = layout(name, four_steps(AXES.get(name, AXIS)))
    opt_state = jax.jit(METHODS[method](optax.sgd(0.01), axis_name=AXIS).init)(START)
    given = *(replicas.stack([tree] * SIZE) for tree in (START, opt_state)), targets.T
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        placed = given if name == "pmap" else jax.device_put(given, sharding)
        compiled = mapped.lower(*placed).compile()
        params, state = compiled(*placed)
    found = replicas.collectives(compiled.as_text())
    large = [each for each in found if each.bytes > 16]
    # Four bits of a number of these leaves may take no more bytes than a count.
    assert large or ("compressed" in method and any(each.is_conditional for each in found))
    assert all(each.is_conditional for each in large)
    if method == "pairs":
        assert {each.operation for each in large} == {"collective-permute"}
    expected, _ = jax.jit(jax.vmap(four_steps(AXIS), axis_name=AXIS))(*given)
    chex.assert_trees_all_close(jax.device_get(params), expected, atol=1e-5, rtol=0)
    center = jax.device_get(state.center)
    for index in range(SIZE if method != "pairs" else 0):
        support.assert_same_bits(replicas.take(center, index), replicas.take(center, 0))


@pytest.mark.parametrize(
    "method", [pytest.param("agn sequential", marks=pytest.mark.slow), "diloco"]
)
def test_a_flag_leaves_no_collective_in_a_local_step_and_one_in_a_commit(method):
    """A local step has no conditional either, and a counted one has its collective in it."""
    tx = METHODS[method](optax.sgd(0.1, 0.9), axis_name=AXIS)
    opt_state = jax.jit(tx.init)(START)
    given = [replicas.stack([tree] * SIZE) for tree in (START, opt_state, START)]
    kind = "all-gather" if method == "agn sequential" else "all-reduce"
    for flag, wanted in ((False, []), (True, [(kind, False)]), (None, [(kind, True)])):
        update = functools.partial(tx.update, commit=flag)
        step = replicas.MAPPINGS["pmap"](lambda p, s, g, update=update: update(g, s, p), SIZE)
        text = step.lower(*given).compile().as_text()
        found = replicas.collectives(text)
        assert [(each.operation, each.is_conditional) for each in found] == wanted
        assert flag is not False or "conditional" not in text


@pytest.mark.slow
def test_compressed_contributions_stay_small_under_vmap_on_a_mesh():
    """Where they are encoded, nothing but their bytes leaves a device."""
    four, largest = Compression(bits=4), Compression(1 / 32, bits=2)
    for name, compress, per_entry in (("spmd explicit", four, 0.52), ("spmd auto", largest, 0.08)):
        tx = DILOCO(optax.sgd(0.1), axis_name=AXIS, compress=compress)
        mapped, mesh = layout(name, lambda p, s, tx=tx: tx.update(p, s, p, commit=True)[0])
        params = {"w": np.ones((64, 128), np.float32)}
        given = (replicas.stack([tree] * SIZE) for tree in (params, tx.init(params)))
        with jax.set_mesh(mesh):
            placed = jax.device_put(tuple(given), NamedSharding(mesh, P(AXIS)))
            text = mapped.lower(*placed).compile().as_text()
        found = replicas.collectives(text)
        assert found
        assert all(each.bytes <= per_entry * 64 * 128 + 1024 for each in found)


@pytest.mark.parametrize("method", ["diloco", "pairs"])
def test_counted_steps_under_a_vmap_without_a_name_are_refused(method):
    """The collective does not know the replicas of an unnamed vmap; an explicit flag works there."""
    tx = METHODS[method](optax.sgd(0.1), axis_name=AXIS)
    params = replicas.stack([replicas.stack([START] * SIZE)] * 2)
    opt_state = jax.jit(jax.vmap(jax.vmap(tx.init)))(params)

    def run(commit):
        update = jax.vmap(lambda p, s: tx.update(p, s, p, commit=commit)[0], axis_name=AXIS)
        return jax.jit(jax.vmap(update))(params, opt_state)

    with pytest.raises(ValueError, match="would exchange in every step"):
        run(None)
    if method == "diloco":
        explicit = run(True)
        chex.assert_trees_all_close(run(jnp.array(True)), explicit, atol=1e-6, rtol=0)
        # Without replicas there is nothing to exchange, and each of a population counts for itself.
        alone = optperm.diloco(optax.sgd(0.1), every=1)
        moves = jax.jit(jax.vmap(lambda p: alone.update(p, alone.init(p), p)[0]))
        chex.assert_trees_all_close(
            moves(replicas.stack([START] * 2)),
            replicas.take(jax.device_get(explicit), np.s_[:, 0]),
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_what_differs_or_was_summed_between_replicas_is_refused_by_its_type(factory):
    """In shard_map's checked mode: a flag of one replica, and the gradient of params of all."""
    tx, checked = factory(optax.sgd(1.0), every=9, axis_name=AXIS), replicas.MAPPINGS["shard_map"]
    targets = np.arange(12.0, dtype=np.float32).reshape(SIZE, 3)

    def update(target, flag=None, is_own=True):
        p = jax.lax.pcast(jnp.zeros(3), AXIS, to="varying") if is_own else jnp.zeros(3)
        grads = jax.grad(lambda p: jnp.sum((p - target) ** 2) / 2)(p)
        return tx.update(grads, tx.init(p), p, commit=flag)[0]

    with pytest.raises(ValueError, match="may differ between replicas"):
        checked(update, SIZE)(targets, np.array([True, False, True, True]))
    with pytest.raises(ValueError, match=r"jax\.lax\.pcast\(params, 'replica', to='varying'\)"):
        checked(functools.partial(update, is_own=False), SIZE)(targets)
    np.testing.assert_array_equal(checked(update, SIZE)(targets), targets)


def test_replicas_that_skipped_a_step_commit_with_the_furthest():
    """Under vmap one clock counts for all, and each divides by the steps that it has made."""
    tx, params = AGN(optax.sgd(1.0), axis_name=AXIS), np.zeros((2, 1), np.float32)
    opt_state = jax.jit(jax.vmap(tx.init))(params)._replace(
        since_commit=np.int32([0, 1]),
        steps=np.int32([[0], [1]]),
        accumulator=np.float32([[0.0], [1.0]]),
    )
    grads = [np.float32([[2.0], [1.0]])] * 2
    trail = loops.train(tx, params, grads, how="vmap", size=2, opt_state=opt_state)
    params, opt_state = trail[-1]
    np.testing.assert_allclose(params, [[-1.5]] * 2)
    assert opt_state.commits.tolist() == [1, 1]


@pytest.mark.slow
def test_the_center_may_be_declared_the_same_on_all_devices():
    """In shard_map's checked mode the center's type says that all replicas agree on it."""
    tx = AGN(optax.sgd(0.1, 0.9), axis_name=AXIS)
    names, evaluate = ("local_state", "accumulator", "skipped"), loops.gradient(loss_fn)

    def run(shared, part):
        params, own, targets = part
        step = loops.make_step(tx, evaluate)
        params, opt_state = loops.carry(step, params, shared._replace(**own), targets)
        own = {name: getattr(opt_state, name) for name in names}
        return opt_state._replace(**dict.fromkeys(names)), (params, own)

    opt_state, targets = jax.jit(tx.init)(START), np.arange(16, dtype=np.float32).reshape(SIZE, 4)
    own = replicas.stack([(START, {name: getattr(opt_state, name) for name in names})] * SIZE)
    shared = opt_state._replace(**dict.fromkeys(names))
    _, (found, _) = replicas.share(run, "shard_map", SIZE)(shared, (*own, targets))
    trail = loops.train(tx, START, list(targets.T), evaluate=evaluate, how="vmap", size=SIZE)
    chex.assert_trees_all_close(found, trail[-1][0], rtol=1e-5)
