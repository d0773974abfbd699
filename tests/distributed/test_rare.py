"""Replicas however they are mapped: what they compute, what crosses devices, and what is refused."""

import functools

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

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, AXIS = 4, replicas.AXIS
START = {"w": np.float32(np.arange(12.0).reshape(3, 4)), "b": np.float32([1.0, -1.0])}
METHODS = {
    f"agn {rule}": functools.partial(optperm.agn, every=3, combine=rule)
    for rule in ("mean", "sum", "sequential")
}
METHODS |= {
    name: functools.partial(optperm.diloco, **options)
    for name, options in {
        "diloco": {"every": 3},
        "plan": {"every": Every(3, 2, 1), "mixing": 0.5},
        "slices": {"every": Every(3, 2), "fragment_of": {"w": [0, 1, 0], "b": 1}},
        "pairs": {"every": 3, "combine": "pairs"},
        "compressed": {"every": 3, "compress": Compression(bits=4)},
    }.items()
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
    mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(kind,))
    if name in replicas.MAPPINGS:
        return replicas.MAPPINGS[name](step, SIZE), mesh
    if "spmd" in name:
        return jax.jit(jax.vmap(step, axis_name=AXIS, spmd_axis_name=AXIS)), mesh
    if name == "mesh of two axes":
        mesh = jax.make_mesh((2, 2), AXES[name], axis_types=(kind, kind))
        return replicas.map_over(mesh, step, check_vma=False), mesh
    rows, axis = jax.vmap(step), AXIS
    if name == "named vmap in shard_map":
        axis, within = AXES[name]
        rows, mesh = (
            jax.vmap(step, axis_name=within),
            jax.make_mesh((2,), (axis,), axis_types=(kind,)),
        )
    options = {"in_specs": P(axis), "out_specs": P(axis), "check_vma": name not in AXES}
    return jax.jit(jax.shard_map(rows, mesh=mesh, **options)), mesh


USUAL = {("vmap in shard_map", "diloco"), ("spmd auto", "agn mean")}
SLOW = {
    ("shard_map", "slices"),
    ("mesh of two axes", "agn sequential"),
    ("named vmap in shard_map", "plan"),
    ("spmd explicit", "pairs"),
}


# Pairs are of one axis.
CELLS = [(a, b) for a in LAYOUTS for b in METHODS if b != "pairs" or a not in AXES]


@pytest.mark.parametrize(("name", "method"), support.every_night(CELLS, USUAL, slow=SLOW))
def test_counted_steps_exchange_within_a_conditional(name, method):
    """No collective of more than a count is outside, and the params are those of a plain vmap."""
    targets = np.float32(np.random.default_rng(0).normal(size=(4, SIZE)))

    def four_steps(axes):
        tx = METHODS[method](optax.sgd(0.01), axis_name=axes)
        return functools.partial(loops.carry, loops.make_step(tx, loops.gradient(loss_fn)))

    mapped, mesh = layout(name, four_steps(AXES.get(name, AXIS)))
    opt_state = METHODS[method](optax.sgd(0.01), axis_name=AXIS).init(START)
    given = *(replicas.stack([tree] * SIZE) for tree in (START, opt_state)), targets.T
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P(mesh.axis_names))
        placed = given if name == "pmap" else jax.device_put(given, sharding)
        compiled = mapped.lower(*placed).compile()
        params, state = compiled(*placed)
    large = [each for each in replicas.collectives(compiled.as_text()) if each.bytes > 16]
    assert large
    assert all(each.is_conditional for each in large)
    if method == "pairs":
        assert {each.operation for each in large} == {"collective-permute"}
    expected, _ = jax.jit(jax.vmap(four_steps(AXIS), axis_name=AXIS))(*given)
    support.assert_close(jax.device_get(params), expected, atol=1e-5)
    center = jax.device_get(state.center)
    for index in range(SIZE if method != "pairs" else 0):
        support.assert_same_bits(replicas.take(center, index), replicas.take(center, 0))


@pytest.mark.parametrize(
    "method", [pytest.param("agn sequential", marks=pytest.mark.slow), "diloco"]
)
def test_a_flag_leaves_no_collective_in_a_local_step_and_one_in_a_commit(method):
    """A local step has no conditional either, and a counted one has its collective in it."""
    tx = METHODS[method](optax.sgd(0.1, 0.9), axis_name=AXIS)
    given = [replicas.stack([tree] * SIZE) for tree in (START, tx.init(START), START)]
    texts = {}
    for flag in (False, True, None):
        step = replicas.MAPPINGS["pmap"](
            lambda p, s, g, flag=flag: tx.update(g, s, p, commit=flag), SIZE
        )
        texts[flag] = step.lower(*given).compile().as_text()
    kind = "all-gather" if method == "agn sequential" else "all-reduce"
    assert "conditional" not in texts[False]
    for flag, wanted in ((False, []), (True, [(kind, False)]), (None, [(kind, True)])):
        found = replicas.collectives(texts[flag])
        assert [(each.operation, each.is_conditional) for each in found] == wanted


@pytest.mark.slow
def test_compressed_contributions_stay_small_under_vmap_on_a_mesh():
    """Where they are encoded, nothing but their bytes leaves a device."""
    for name, compress, per_entry in (
        ("spmd explicit", Compression(bits=4), 0.52),
        ("spmd auto", Compression(1 / 32, bits=2), 0.08),
    ):
        tx = optperm.diloco(optax.sgd(0.1), every=2, axis_name=AXIS, compress=compress)
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
    params = jax.tree.map(lambda leaf: np.stack([np.stack([leaf] * SIZE)] * 2), START)
    opt_state = jax.vmap(jax.vmap(tx.init))(params)

    def run(commit):
        def update(p, s):
            return tx.update(p, s, p, commit=commit)[0]

        return jax.jit(jax.vmap(jax.vmap(update, axis_name=AXIS)))(params, opt_state)["b"]

    with pytest.raises(ValueError, match="would exchange in every step"):
        run(None)
    if method == "diloco":
        explicit = run(True)
        support.assert_close(run(jnp.array(True)), explicit, atol=1e-6)
        # Without replicas there is nothing to exchange, and each of a population counts for itself.
        alone = optperm.diloco(optax.sgd(0.1), every=1)
        moves = jax.jit(jax.vmap(lambda p: alone.update(p, alone.init(p), p)[0]))(
            replicas.stack([START] * 2)
        )
        support.assert_close(np.stack([moves["b"]] * SIZE, axis=1), explicit, atol=1e-6)


def test_a_flag_that_differs_between_replicas_is_refused():
    """In shard_map's checked mode the type of the flag tells."""
    flags = np.array([True, False, True, True])
    for factory in (optperm.agn, optperm.diloco):
        tx = factory(optax.sgd(0.1), every=9, axis_name=AXIS)

        def step(p, flag, tx=tx):
            return tx.update(p, tx.init(p), p, commit=flag)[0]

        with pytest.raises(ValueError, match="may differ between replicas"):
            replicas.MAPPINGS["shard_map"](step, SIZE)(np.ones((SIZE, 2), np.float32), flags)


def test_gradients_that_were_summed_over_the_replicas_are_refused():
    """In shard_map's checked mode params of all replicas alike have summed gradients."""
    targets = np.arange(12.0, dtype=np.float32).reshape(SIZE, 3)

    def update(tx, own, target):
        p = jnp.zeros(3)
        p = jax.lax.pcast(p, AXIS, to="varying") if own else p
        g = jax.grad(lambda p: jnp.sum((p - target) ** 2) / 2)(p)
        return tx.update(g, tx.init(p), p)[0]

    for factory in (optperm.agn, optperm.diloco):
        tx = factory(optax.sgd(1.0), every=3, axis_name=AXIS)
        alike, own = (functools.partial(update, tx, own) for own in (False, True))
        with pytest.raises(ValueError, match=r"jax\.lax\.pcast\(params, 'replica', to='varying'\)"):
            replicas.MAPPINGS["shard_map"](alike, SIZE)(targets)
        found = replicas.MAPPINGS["shard_map"](own, SIZE)(targets)
        np.testing.assert_array_equal(found, targets)


def test_replicas_that_skipped_a_step_commit_with_the_furthest():
    """Under vmap one clock counts for all, and each divides by the steps that it has made."""
    tx = optperm.agn(optax.sgd(1.0), every=3, axis_name=AXIS)
    params = np.zeros((2, 1), np.float32)
    opt_state = jax.vmap(tx.init)(params)
    opt_state = opt_state._replace(
        since_commit=np.int32([0, 1]), accumulator=np.float32([[0.0], [1.0]])
    )
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(2):
        params, opt_state = step(params, opt_state, np.float32([[2.0], [1.0]]))
    np.testing.assert_allclose(params, [[-1.5]] * 2)
    assert opt_state.commits.tolist() == [1, 1]


def test_the_center_may_be_declared_the_same_on_all_devices():
    """In shard_map's checked mode the center's type says that all replicas agree on it."""
    tx = optperm.agn(optax.sgd(0.1, 0.9), every=3, axis_name=AXIS)
    own = "local_state", "accumulator", "skipped"
    fields = optperm.distributed.AgnState._fields
    specs = optperm.distributed.AgnState(*(P(AXIS) if name in own else P() for name in fields))

    def apart(function, opt_state):
        """Change what is each replica's own by a function."""
        return opt_state._replace(**{name: function(getattr(opt_state, name)) for name in own})

    def run(params, opt_state, targets):
        first = functools.partial(jax.tree.map, lambda leaf: leaf[0])
        lead = functools.partial(jax.tree.map, lambda leaf: leaf[None])
        one = loops.make_step(tx, loops.gradient(loss_fn))
        params, opt_state = loops.carry(one, first(params), apart(first, opt_state), first(targets))
        return lead(params), apart(lead, opt_state)

    given = P(AXIS), specs, P(AXIS)
    mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=given[:2])
    params, targets = replicas.stack([START] * SIZE), np.arange(16, dtype=np.float32)
    opt_state = apart(lambda tree: replicas.stack([tree] * SIZE), tx.init(START))
    found, _ = jax.jit(mapped)(params, opt_state, targets.reshape(SIZE, 4))
    options = {"evaluate": loops.gradient(loss_fn), "how": "vmap", "size": SIZE}
    trail = loops.train(tx, START, list(targets.reshape(SIZE, 4).T), **options)
    support.assert_close(found, trail[-1][0], rtol=1e-5)
