"""Steps that are counted on the device exchange within a conditional, however replicas are mapped."""

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

pytestmark = pytest.mark.usefixtures("lenient")

SIZE, AXIS = 4, replicas.AXIS
START = {"w": np.float32(np.arange(12.0).reshape(3, 4)), "b": np.float32([1.0, -1.0])}
METHODS = replicas.METHODS | {
    "agn sum": functools.partial(optperm.agn, every=3, combine="sum"),
    "plan": functools.partial(optperm.diloco, every=optperm.distributed.Every(3, 2, 1), mixing=0.5),
    "slices": functools.partial(
        optperm.diloco, every=optperm.distributed.Every(3, 2), fragment_of={"w": [0, 1, 0], "b": 1}
    ),
    "pairs": functools.partial(optperm.diloco, every=3, combine="pairs"),
    "compressed": functools.partial(
        optperm.diloco, every=3, compress=optperm.distributed.Compression(bits=4)
    ),
}


def loss_fn(params, batch):
    return sum(jnp.sum((p - batch) ** 2) for p in jax.tree.leaves(params))


def layout(name, step):
    """The mapped step, and the mesh on which its stacked arguments lie."""
    kind = AxisType.Explicit if "explicit" in name else AxisType.Auto
    mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(kind,))
    if name in replicas.MAPPINGS:
        return replicas.MAPPINGS[name](step, SIZE), mesh
    if "spmd" in name:
        return jax.vmap(step, axis_name=AXIS, spmd_axis_name=AXIS), mesh
    unnamed = jax.vmap(step)
    return jax.shard_map(unnamed, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), mesh


LAYOUTS = [
    *("vmap in shard_map", "spmd auto", "spmd explicit"),
    *("pmap", "shard_map", "shard_map unchecked"),
]
USUAL = {
    ("shard_map", "agn sequential"),
    ("spmd explicit", "plan"),
    ("vmap in shard_map", "diloco"),
    ("spmd auto", "agn mean"),
    ("spmd explicit", "pairs"),
}


@pytest.mark.parametrize(
    ("name", "method"), support.every_night([(a, b) for a in LAYOUTS for b in METHODS], USUAL)
)
def test_counted_steps_exchange_within_a_conditional(name, method):
    """No collective of more than a count is outside, and the params are those of a plain vmap."""
    tx = METHODS[method](optax.sgd(0.01), axis_name=AXIS)
    one = loops.make_step(tx, loops.gradient(loss_fn))
    targets = np.float32(np.random.default_rng(0).normal(size=(4, SIZE)))

    def four_steps(params, opt_state, targets):
        def body(carry, target):
            return one(*carry, target), ()

        return jax.lax.scan(body, (params, opt_state), targets)[0]

    mapped, mesh = layout(name, four_steps)
    given = *(replicas.stack([tree] * SIZE) for tree in (START, tx.init(START))), targets.T
    with jax.set_mesh(mesh):
        placed = given if name == "pmap" else jax.device_put(given, NamedSharding(mesh, P(AXIS)))
        compiled = (mapped if name == "pmap" else jax.jit(mapped)).lower(*placed).compile()
        params, state = compiled(*placed)
    large = [each for each in replicas.collectives(compiled.as_text()) if each.bytes > 16]
    assert large
    assert all(each.is_conditional for each in large)
    if method == "pairs":
        assert {each.operation for each in large} == {"collective-permute"}
    expected, _ = jax.jit(jax.vmap(four_steps, axis_name=AXIS))(*given)
    support.assert_close(jax.device_get(params), expected, atol=1e-5)
    center = jax.device_get(state.center)
    for index in range(SIZE if method != "pairs" else 0):
        support.assert_same_bits(replicas.take(center, index), replicas.take(center, 0))


def test_compressed_contributions_stay_small_under_vmap_on_a_mesh():
    """Where they are encoded, nothing but their bytes leaves a device."""
    for name, compress, per_entry in (
        ("spmd explicit", optperm.distributed.Compression(bits=4), 0.52),
        ("spmd auto", optperm.distributed.Compression(1 / 32, bits=2), 0.08),
    ):
        tx = optperm.diloco(optax.sgd(0.1), every=2, axis_name=AXIS, compress=compress)
        mapped, mesh = layout(name, lambda p, s, tx=tx: tx.update(p, s, p, commit=True)[0])
        params = {"w": np.ones((64, 128), np.float32)}
        given = (replicas.stack([tree] * SIZE) for tree in (params, tx.init(params)))
        with jax.set_mesh(mesh):
            placed = jax.device_put(tuple(given), NamedSharding(mesh, P(AXIS)))
            text = jax.jit(mapped).lower(*placed).compile().as_text()
        found = replicas.collectives(text)
        assert found
        assert all(each.bytes <= per_entry * 64 * 128 + 1024 for each in found)


def test_other_layouts_of_counted_steps_are_refused():
    """The collective does not know the replicas of an unnamed vmap; an explicit flag works there."""
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name=AXIS)
    params = jax.tree.map(lambda leaf: np.stack([np.stack([leaf] * SIZE)] * 2), START)
    opt_state = jax.vmap(jax.vmap(tx.init))(params)

    def update(commit, p, s):
        return tx.update(p, s, p, commit=commit)[0]

    def run(commit):
        replicated = jax.vmap(functools.partial(update, commit), axis_name=AXIS)
        return jax.jit(jax.vmap(replicated))(params, opt_state)

    with pytest.raises(ValueError, match="would exchange in every step"):
        run(None)
    explicit = run(True)["b"]
    support.assert_close(explicit[0], explicit[1], atol=0)
    support.assert_close(run(jnp.array(True))["b"], explicit, atol=1e-6)
    # Without replicas there is nothing to exchange, and each member of a population counts for itself.
    alone = optperm.diloco(optax.sgd(0.1), every=1)
    stacked = replicas.stack([START] * 2)
    moves = jax.jit(jax.vmap(lambda p: alone.update(p, alone.init(p), p)[0]))(stacked)
    support.assert_close(moves["b"], explicit[:, 0], atol=1e-6)


def test_a_flag_that_differs_between_replicas_is_refused():
    """In shard_map's checked mode the type of the flag tells."""
    mesh = jax.make_mesh((SIZE,), (AXIS,), axis_types=(AxisType.Auto,))
    flags = np.array([True, False, True, True])
    for factory in (optperm.agn, optperm.diloco):
        tx = factory(optax.sgd(0.1), every=9, axis_name=AXIS)

        def step(p, flag, tx=tx):
            return tx.update(p, tx.init(p), p, commit=flag[0])[0]

        mapped = jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))
        with pytest.raises(ValueError, match="differs between replicas"):
            jax.jit(mapped)(np.ones((SIZE, 2), np.float32), flags)


def test_replicas_that_skipped_a_step_commit_with_the_furthest():
    """Under vmap one clock counts for all, and each divides by the steps that it has made."""
    tx = optperm.agn(optax.sgd(1.0), every=3, axis_name=AXIS)
    params = jnp.zeros((2, 1))
    opt_state = jax.vmap(tx.init)(params)
    opt_state = opt_state._replace(since_commit=jnp.array([0, 1]))
    opt_state = opt_state._replace(accumulator=jnp.array([[0.0], [1.0]]))
    step = replicas.MAPPINGS["vmap"](loops.make_step(tx), 2)
    for _ in range(2):
        params, opt_state = step(params, opt_state, jnp.array([[2.0], [1.0]]))
    np.testing.assert_allclose(params, [[-1.5]] * 2)
    assert opt_state.commits.tolist() == [1, 1]


def test_explicit_steps_in_one_program_delay_an_exchange():
    """The step that sends, the one between and the one that receives, under vmap within shard_map."""
    plan = optperm.distributed.Every(6, 2, 2)
    tx = optperm.diloco(optax.sgd(0.1), every=plan, axis_name=AXIS, mixing=0.5)

    def steps(*carry_and_target):
        *carry, target = carry_and_target
        for number in (3, 4, 5, 6, 7, 8):
            commit = {"commit": plan.at(number)}
            evaluate = lambda p, batch, commit=commit: (jax.grad(loss_fn)(p, batch), commit)  # noqa: E731
            carry = loops.make_step(tx, evaluate)(*carry, target)
        return carry

    given = (
        *(replicas.stack([tree] * SIZE) for tree in (START, tx.init(START))),
        np.float32([0, 1, 2, 3]),
    )
    mapped, mesh = layout("vmap in shard_map", steps)
    with jax.set_mesh(mesh):
        params, opt_state = jax.jit(mapped)(*given)
    expected, _ = jax.jit(jax.vmap(steps, axis_name=AXIS))(*given)
    support.assert_close(jax.device_get(params), expected, atol=1e-5)
    assert opt_state.weights.tolist() == [[-1.0, -1.0]] * SIZE
