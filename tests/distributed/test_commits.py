"""What ends a period, and what a commit does alone, with the shards of a replica, or in wrappers."""

import functools
import re

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
from optperm.distributed import Compression, Every, center_params

SIZE, AXIS = 4, replicas.AXIS
START = {"w": np.float32([0.5, -0.5]), "b": np.float32(1.0)}


def flagged_step(tx, flag):
    return loops.make_step(tx, lambda p, batch: (batch, {"commit": flag}))


@functools.lru_cache(maxsize=8)
def mapped_step(tx, flag, size=SIZE):
    return replicas.MAPPINGS["vmap"](flagged_step(tx, flag), size)


def run_flagged(tx, grads, flags):
    """Return params and state of four replicas after each step, by one program for each kind of flag."""
    trail = [tuple(replicas.stack([tree] * SIZE) for tree in (START, jax.jit(tx.init)(START)))]
    for flag, each in zip(flags, grads, strict=True):
        trail.append(mapped_step(tx, flag)(*trail[-1], each))
    return trail


def test_a_counted_step_copies_nothing():
    """Params and state are written in place, after the conditional has read them.

    XLA as of JAX 0.10 copies one array a leaf for AGN.
    """
    params = {f"w{i}": jax.ShapeDtypeStruct((1000,), jnp.float32) for i in range(6)}
    of_agn = 0 if jax.__version_info__ >= (0, 12) else len(params)
    for tx, most in (
        (optperm.agn(optax.sgd(0.1), every=5), of_agn),
        (optperm.diloco(optax.sgd(0.1), every=5), 0),
    ):
        step = jax.jit(loops.make_step(tx), donate_argnums=(0, 1))
        program = step.lower(params, jax.eval_shape(tx.init, params), params).compile()
        assert len(re.findall(r"= f32\[1000\]\S* copy\(", program.as_text())) <= most


@pytest.mark.parametrize("wrap", [lambda tx: optax.chain(optax.clip(1.0), tx), None])
@pytest.mark.usefixtures("lenient")
def test_a_flag_travels_through_chain_and_multi_steps(wrap):
    """Under jit; a micro-step of MultiSteps that only accumulates commits nothing."""
    inner = optperm.agn(optax.sgd(0.1), every=1000)
    tx, params = wrap(inner) if wrap else optax.MultiSteps(inner, 2), np.zeros(2, np.float32)
    opt_state = jax.jit(tx.init)(params)

    @functools.partial(jax.jit, static_argnums=2)
    def step(params, opt_state, flag):
        return flagged_step(tx, flag)(params, opt_state, jnp.ones(2))

    for commit in (False, False, False, True):
        params, opt_state = step(params, opt_state, commit)
    support.assert_same_bits(center_params(opt_state), params)
    np.testing.assert_allclose(params, [-0.1, -0.1], rtol=1e-6)


def test_a_bad_batch_does_not_lose_a_replica():
    """An optimizer that divides by the norm of a gradient of zeros recovers with apply_if_finite."""

    def update(updates, norm, params=None, *, grad=None, **extra_args):
        norm = 0.5 * norm + 0.5 * optax.tree.norm(updates if grad is None else grad)
        return jax.tree.map(lambda g: -0.1 * g / norm, updates), norm

    momo = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0.0), update)
    evaluate = lambda p, batch: (batch, {"grad": batch})  # noqa: E731
    batches = [np.full(3, value, np.float32) for value in (np.nan, 1.0, 1.0)]
    for optimizer, recovers in ((momo, False), (optax.apply_if_finite(momo, 10), True)):
        tx = optperm.agn(optimizer, every=10, outer=optax.sgd(0.1))
        options = {"evaluate": evaluate, "apply": loops.by_addition, "init": "jit"}
        trail = loops.train(tx, np.zeros(3, np.float32), batches, **options)
        params, opt_state = trail[-1]
        assert np.isfinite(params).all() == recovers
        # The state was never poisoned: what is lost without the wrapper is one step of 0/0.
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(opt_state.local_state))


METHODS = {
    "agn mean": optperm.agn,
    "agn sequential": functools.partial(optperm.agn, combine="sequential"),
    "diloco": optperm.diloco,
}
SHARDED = {"kernel": P(AXIS, None, "model"), "bias": P(AXIS, "model"), "scale": P(AXIS)}


@pytest.mark.parametrize(
    ("method", "types", "axes", "checked"),
    support.in_turns(
        METHODS, [AxisType.Auto, AxisType.Explicit], ["manual", "partial"], [True, False]
    ),
)
def test_a_commit_moves_the_shards_of_a_replica_as_they_lie(method, types, axes, checked):
    """One collective over two replicas. Their four shards agree on what is finite by a number a leaf."""
    manual, flag, rng = axes == "manual", True if checked else None, np.random.default_rng(0)
    options = {"shard_axes": "model"} if manual and not checked else {}
    make = functools.partial(METHODS[method], optax.sgd(0.1), every=1)
    tx, alone = make(axis_name=AXIS, **options), make()
    mesh = jax.make_mesh((2, 4), (AXIS, "model"), axis_types=(types,) * 2)
    shapes = {"kernel": (16, 8), "bias": (8,), "scale": (8,)}
    start, pulls = (
        {k: rng.normal(size=v).astype("f") for k, v in shapes.items()} for _ in range(2)
    )
    initial = jax.jit(alone.init)(start)
    given = [replicas.stack([tree] * 2) for tree in (start, initial, pulls)]
    # Not finite on one shard of the second replica alone.
    given[0 if method == "diloco" else 2]["kernel"][1, 3, 5] = np.nan

    def step(*given):
        one = flagged_step(tx, flag)(*replicas.take(given, 0))
        return jax.tree.map(lambda leaf: leaf[None], one)

    specs = jax.tree_util.tree_map_with_path(
        lambda path, _: SHARDED.get(getattr(path[-1], "key", None), P(AXIS)), tuple(given)
    )
    placed = jax.tree.map(
        lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec)), tuple(given), specs
    )
    within = specs if manual else jax.tree.map(lambda _: P(AXIS), specs)
    names = {} if manual else {"axis_names": {AXIS}}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=within, out_specs=within[:2], check_vma=checked, **names
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(mapped).lower(*placed).compile()
        after, opt_state = jax.device_get(compiled(*placed))
    # In a partially manual shard_map jax 0.10 itself gathers what is summed on explicit axes.
    if manual or types == AxisType.Auto or jax.__version_info__ >= (0, 11):
        found = replicas.collectives(compiled.as_text())
        size = 4 * (16 * 8 // 4 + 8 // 4 + 8 + 1) * (2 if method == "agn sequential" else 1)
        # XLA may join the checks of the params and of the sum. Of two sharded leaves they have 16 bytes.
        large = [(each.operation, each.bytes) for each in found if each.bytes > 4 * 2 * 2]
        assert large == [("all-reduce", size)]
    assert opt_state.skipped.tolist() == [0, 1]
    wanted, _ = jax.jit(flagged_step(alone, True))(start, initial, pulls)
    for index in range(2):
        chex.assert_trees_all_close(replicas.take(after, index), wanted, atol=1e-6, rtol=0)


def grads_of(steps):
    rng = np.random.default_rng(0)
    return [
        {"w": rng.normal(size=(SIZE, 2)).astype("f"), "b": rng.normal(size=SIZE).astype("f")}
        for _ in range(steps)
    ]


COMMITTED_ALONE = METHODS | {
    "pairs": functools.partial(optperm.diloco, combine="pairs"),
    "delayed": functools.partial(optperm.diloco, every=Every(4, 2, 2), mixing=0.25),
    "compressed": functools.partial(optperm.diloco, compress=Compression(0.5, bits=4)),
}


@pytest.mark.parametrize(
    "method", support.every_night(COMMITTED_ALONE, ["agn mean"], slow=["delayed"])
)
@pytest.mark.usefixtures("lenient")
def test_a_commit_alone_equals_a_commit_with_the_last_step(method):
    """The params and the center, by a schedule of the center at the last step; a second one is none."""
    optimizer = optax.sgd(lambda count: 0.1 / (1 + count), momentum=0.9)
    options = {} if method == "delayed" else {"every": 100}
    if "agn" in method:
        options["outer"] = optimizer
    tx, grads = COMMITTED_ALONE[method](optimizer, axis_name=AXIS, **options), grads_of(5)
    wanted = run_flagged(tx, grads, [None] * 4 + [True])[-1]
    nan = jax.tree.map(lambda g: np.full_like(g, np.nan), grads[0])
    *_, last, alone, again = run_flagged(tx, [*grads, nan, nan], [None] * 5 + ["only", "only"])
    # Pairs are drawn from the number of the step, which is the next one.
    if method != "pairs":
        chex.assert_trees_all_close(alone, wanted, atol=1e-6, rtol=0)
    params, state = alone
    assert state.since_commit.tolist() == [0] * SIZE
    assert state.count.tolist() == [5] * SIZE
    support.assert_same_bits(state.local_state, last[1].local_state)
    if method != "delayed":  # whose mixing keeps a part of the local params
        support.assert_same_bits(params, center_params(state, final=True))
    # The outer momentum makes no step without a gradient.
    support.assert_same_bits(again, alone)


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_a_commit_alone_in_an_unnamed_vmap_over_seeds_is_of_those_that_made_a_step(factory):
    tx = factory(optax.sgd(0.1, momentum=0.9), every=9, axis_name=AXIS)
    fresh, moved = run_flagged(tx, grads_of(1), [False])
    run = jax.vmap(jax.vmap(flagged_step(tx, "only"), axis_name=AXIS))
    params, state = jax.jit(run)(*replicas.stack([moved, fresh]), replicas.stack([moved, fresh])[0])
    assert state.commits.tolist() == [[1] * SIZE, [0] * SIZE]
    support.assert_same_bits(replicas.take((params, state), 1), fresh)
    support.assert_same_bits(params, state.center)


@pytest.mark.parametrize("name", support.every_night(["agn mean", "diloco"], ["agn mean"]))
@pytest.mark.usefixtures("lenient")
def test_a_method_that_places_params_follows_the_pull(name):
    """Each replica permutes its weights exactly, and continues from the center's permutation."""
    sgperm, start = optperm.sgperm(0.1), {"kernel": np.asarray(support.random_params()["kernel"])}
    outer = {"outer": sgperm} if name == "diloco" else {}
    tx = METHODS[name](sgperm, every=6, axis_name=AXIS, **outer)
    grads = np.sin(np.arange(1.0, 15.0).reshape(7, 2, 1, 1) * np.arange(60.0).reshape(12, 5))
    batches = [{"kernel": each} for each in np.float32(grads)]
    trail = jax.device_get(loops.train(tx, start, batches, how="vmap", size=2, init="jit"))
    only = mapped_step(tx, "only", 2)(*trail[-1], trail[-1][0])
    for step, (params, opt_state) in enumerate([*trail, only], start=1):
        for index in range(2):
            support.assert_permutes(replicas.take(params, index), start)
        is_commit = step in (6, 8)
        assert is_commit == (len(np.unique(params["kernel"], axis=0)) == 1)
        if is_commit:
            support.assert_same_bits(params, center_params(opt_state))
    # A step after the pull starts from the center: each weight differs by what one step moves it.
    before, center, after = (trail[step][0]["kernel"][0] for step in (4, 5, 6))
    assert np.mean(np.abs(after - center)) < 0.7 * np.mean(np.abs(after - before))
