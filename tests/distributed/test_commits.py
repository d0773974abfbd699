"""When a period ends, and what a commit does: flags, schedules, shards of a replica, bad numbers."""

import functools
import itertools
import re

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

START = {"w": np.float32([0.5, -0.5]), "b": np.float32(1.0)}


def grads_of(steps, size=4, seed=0):
    rng = np.random.default_rng(seed)
    return [
        jax.tree.map(lambda p: rng.normal(size=(size, *p.shape)).astype(np.float32), START)
        for _ in range(steps)
    ]


def flagged_step(tx, flag):
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params, commit=flag)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    return step


@functools.lru_cache(maxsize=8)
def mapped_step(tx, flag, how, size):
    return replicas.MAPPINGS[how](flagged_step(tx, flag), size)


def run_flagged(tx, grads, flags, how="vmap"):
    """Trains with a flag for each step, one compiled program for each kind of flag."""
    size = len(grads[0]["b"])
    params, opt_state = (replicas.stack([tree] * size) for tree in (START, tx.init(START)))
    trail = []
    for flag, each in zip(flags, grads, strict=True):
        params, opt_state = mapped_step(tx, flag, how, size)(params, opt_state, each)
        trail.append((params, opt_state))
    return trail


@pytest.mark.parametrize("method", support.every_night(replicas.METHODS, ["diloco"]))
def test_explicit_and_counted_commits_agree(method):
    """Flags at the period's multiples, and a mixture of flags and counts, give what counting gives."""
    tx = replicas.METHODS[method](optax.adam(0.1), axis_name=replicas.AXIS)
    grads = grads_of(7)
    counted = run_flagged(tx, grads, [None] * 7)
    explicit = run_flagged(tx, grads, [False, False, True] * 2 + [False])
    mixed = run_flagged(tx, grads, [None, False, None, None, None, True, None])
    for wanted, one, other in zip(counted, explicit, mixed, strict=True):
        support.assert_close(one[0], wanted[0], atol=1e-6)
        support.assert_close(other[0], wanted[0], atol=1e-6)
        for field in ("count", "since_commit", "commits", "pulled", "skipped"):
            np.testing.assert_array_equal(getattr(one[1], field), getattr(wanted[1], field))


def test_an_explicit_commit_divides_by_the_steps_made():
    """A flag is followed whatever the period says: gradients of 1 give a mean of 1 after two steps."""
    tx = optperm.agn(optax.sgd(0.1), every=100)
    params, ones = jnp.zeros(2), jnp.ones(2)
    opt_state = tx.init(params)
    for commit in (False, True, True):
        updates, opt_state = tx.update(ones, opt_state, params, commit=commit)
        params = optperm.apply_updates(params, updates, opt_state)
    np.testing.assert_allclose(params, [-0.2, -0.2], rtol=1e-6)
    assert (int(opt_state.commits), int(opt_state.count)) == (2, 3)


@pytest.mark.parametrize("method", replicas.METHODS)
def test_an_explicit_local_step_is_the_optimizer_alone(method):
    """No conditional, no collective, nothing of the center but its own buffers handed on."""
    tx = replicas.METHODS[method](optax.sgd(0.1, 0.9), axis_name=replicas.AXIS)
    params, opt_state = (replicas.stack([tree] * 4) for tree in (START, tx.init(START)))
    (grads,) = grads_of(1)
    texts = {
        flag: replicas.MAPPINGS["pmap"](
            lambda p, s, g, flag=flag: tx.update(g, s, p, commit=flag), 4
        )
        .lower(params, opt_state, grads)
        .compile()
        .as_text()
        for flag in (False, True, None)
    }
    assert not replicas.collectives(texts[False])
    assert "conditional" not in texts[False]
    assert len(replicas.collectives(texts[True])) == 1
    assert "conditional" in texts[None]


def test_a_counted_step_copies_nothing():
    """Params and state are written in place, after the conditional has read them.

    XLA as of JAX 0.10 copies one array a leaf for AGN.
    """
    params = {f"w{i}": jnp.ones(1000) for i in range(6)}
    of_agn = 0 if jax.__version_info__ >= (0, 12) else len(params)
    for tx, most in (
        (optperm.agn(optax.sgd(0.1), every=5), of_agn),
        (optperm.diloco(optax.sgd(0.1), every=5), 0),
    ):
        step = jax.jit(loops.make_step(tx), donate_argnums=(0, 1))
        program = step.lower(params, tx.init(params), params).compile()
        assert len(re.findall(r"= f32\[1000\]\S* copy\(", program.as_text())) <= most


def test_flags_travel_through_chain_and_multi_steps():
    """Under jit, and by `functools.partial` where an optimizer's update takes no flag."""
    inner = optperm.agn(optax.sgd(0.1), every=1000)
    for wrap, every in ((lambda tx: optax.chain(optax.clip(1.0), tx), 1), (None, 2)):
        tx = wrap(inner) if wrap else optax.MultiSteps(inner, 2)
        params = jnp.zeros(2)
        opt_state = tx.init(params)
        update = jax.jit(tx.update, static_argnames="commit")
        for commit in (False, False, False, True):
            updates, opt_state = update(jnp.ones(2), opt_state, params, commit=commit)
            params = optperm.apply_updates(params, updates, opt_state)
        support.assert_same_bits(optperm.distributed.center_params(opt_state), params)
        np.testing.assert_allclose(params, -0.1 * np.ones(2), rtol=1e-6)
        assert every


def test_a_flag_may_be_traced():
    """A scalar bool that is known on the device decides as a Python bool does."""
    for method in (optperm.agn, optperm.diloco):
        tx = method(optax.sgd(0.1), every=9)
        opt_state = tx.init(START)
        step = jax.jit(lambda flag, tx=tx, s=opt_state: tx.update(START, s, START, commit=flag))
        for flag in (True, False):
            explicit = tx.update(START, opt_state, START, commit=flag)
            support.assert_close(step(flag), explicit, atol=1e-6)


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_a_schedule_of_periods(factory):
    """Of the number of commits made: periods of 1, 2, 3 end after steps 1, 3 and 6."""
    tx = factory(optax.sgd(0.1), every=lambda commits: commits + 1)
    trail = loops.train(tx, START, [START] * 6)
    commits = [bool(np.all(s.pulled)) for _, s in trail]
    assert commits == [True, False, True, False, False, True]
    explicit = run_flagged(
        factory(optax.sgd(0.1), every=9, axis_name=replicas.AXIS),
        [replicas.stack([START])] * 6,
        commits,
    )
    for (params, _), (wanted, _) in zip(trail, explicit, strict=True):
        support.assert_close(params, replicas.take(wanted, 0), atol=1e-6)


def test_a_period_that_is_made_longer_divides_by_its_own_steps():
    """Changed from 2 to 4 in the middle of a period, the commit is the mean of four gradients."""
    tx = optax.inject_hyperparams(optperm.agn)(optax.sgd(1.0), every=2)
    params = jnp.zeros(())
    opt_state = tx.init(params)
    for step, grad in enumerate([1.0, 2.0, 3.0, 6.0]):
        if step == 1:
            opt_state.hyperparams["every"] = jnp.int32(4)
        updates, opt_state = tx.update(jnp.float32(grad), opt_state, params)
        params = optperm.apply_updates(params, updates, opt_state)
    assert float(params) == -3.0


def test_gradients_that_were_summed_over_the_replicas_are_refused():
    """In shard_map's checked mode params of all replicas alike have summed gradients."""
    mesh = jax.make_mesh((4,), (replicas.AXIS,), axis_types=(AxisType.Auto,))
    targets = np.arange(12.0, dtype=np.float32).reshape(4, 3)

    def local(tx, own):
        def run(target):
            p = jnp.zeros(3)
            p = jax.lax.pcast(p, replicas.AXIS, to="varying") if own else p
            g = jax.grad(lambda p: jnp.sum((p - target[0]) ** 2) / 2)(p)
            updates, _ = tx.update(g, tx.init(p), p)
            return updates[None]

        return jax.jit(
            jax.shard_map(run, mesh=mesh, in_specs=P(replicas.AXIS), out_specs=P(replicas.AXIS))
        )

    for method in replicas.METHODS.values():
        tx = method(optax.sgd(1.0), axis_name=replicas.AXIS)
        with pytest.raises(ValueError, match=r"jax\.lax\.pcast\(params, 'replica', to='varying'\)"):
            local(tx, own=False)(targets)
        np.testing.assert_array_equal(local(tx, own=True)(targets), targets)


SHARDED = {
    "kernel": P(replicas.AXIS, None, "model"),
    "bias": P(replicas.AXIS, "model"),
    "scale": P(replicas.AXIS),
}


def _on_two_by_four(tx, types, *, manual, checked, flag):
    """A step of two replicas whose params are cut in four, and its params, state and gradients."""
    mesh = jax.make_mesh((2, 4), (replicas.AXIS, "model"), axis_types=(types,) * 2)
    rng = np.random.default_rng(0)
    shapes = {"kernel": (2, 16, 8), "bias": (2, 8), "scale": (2, 8)}
    params, grads = (
        {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(2)
    )
    params = jax.tree.map(lambda leaf: np.stack([leaf[0]] * 2), params)

    def step(params, opt_state, grads):
        params, opt_state, grads = replicas.take((params, opt_state, grads), 0)
        updates, opt_state = tx.update(grads, opt_state, params, commit=flag)
        params = optperm.apply_updates(params, updates, opt_state)
        return jax.tree.map(lambda leaf: leaf[None], (params, opt_state))

    opt_state = jax.vmap(tx.init)(params)

    def spec(path, leaf):
        name = getattr(path[-1], "key", None)
        return SHARDED.get(name, P(replicas.AXIS))

    specs = jax.tree_util.tree_map_with_path(spec, opt_state)
    outer = (SHARDED, specs, SHARDED)
    place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))  # noqa: E731
    placed = jax.tree.map(place, (params, opt_state, grads), outer)
    within = outer if manual else jax.tree.map(lambda _: P(replicas.AXIS), outer)
    options = {} if manual else {"axis_names": {replicas.AXIS}}
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=within, out_specs=within[:2], check_vma=checked, **options
    )
    return mesh, jax.jit(mapped), placed


@pytest.mark.parametrize(
    ("method", "types", "axes", "checked"),
    support.in_turns(
        ["agn mean", "agn sequential", "diloco"],
        [AxisType.Auto, AxisType.Explicit],
        ["manual", "partial"],
        [True, False],
    ),
)
def test_a_commit_moves_the_shards_of_a_replica_as_they_lie(method, types, axes, checked):
    """One collective over the replicas, numbers alone over the shards, which agree on who takes part."""
    manual, flag = axes == "manual", True if checked else None
    options = {"shard_axes": "model"} if manual and not checked else {}
    tx = replicas.METHODS[method](optax.sgd(0.1), axis_name=replicas.AXIS, every=1, **options)
    mesh, step, (params, opt_state, grads) = _on_two_by_four(
        tx, types, manual=manual, checked=checked, flag=flag
    )
    with jax.set_mesh(mesh):
        compiled = step.lower(params, opt_state, grads).compile()
        shards = sum(
            leaf.size // (8 if "model" in SHARDED[name] else 2) for name, leaf in params.items()
        )
        copies = 2 if method == "agn sequential" else 1
        wanted = [("all-reduce", copies * 4 * (shards + 1))]
        # In a partially manual shard_map jax 0.10 itself gathers what is summed on explicit axes.
        if manual or types == AxisType.Auto or jax.__version_info__ >= (0, 11):
            assert [
                (each.operation, each.bytes)
                for each in replicas.collectives(compiled.as_text())
                if each.bytes > 8
            ] == wanted
        # NaN lies on one shard of the second replica alone.
        bad = np.array(params["kernel"] if method == "diloco" else grads["kernel"])
        bad[1, 3, 5] = np.nan
        bad = jax.device_put(bad, NamedSharding(mesh, SHARDED["kernel"]))
        if method == "diloco":
            after, opt_state = step(params | {"kernel": bad}, opt_state, grads)
        else:
            after, opt_state = step(params, opt_state, grads | {"kernel": bad})
    assert opt_state.skipped.tolist() == [0, 1]
    rule = {"agn mean": "agn sequential"}.get(method, method)
    alone = replicas.METHODS[rule](optax.sgd(0.1), every=1)
    one = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf)[0])
    updates, state = alone.update(one(grads), alone.init(one(params)), one(params))
    wanted = optperm.apply_updates(one(params), updates, state)
    for index in range(2):
        support.assert_close(replicas.take(jax.device_get(after), index), wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", support.every_night(["float16", "float32"], ["float32"]))
def test_contributions_that_overflow_together_leave_the_center(dtype):
    """Each is finite, their sum is not: the center stays, and all replicas count it."""
    largest = float(jnp.finfo(dtype).max)
    tx = optperm.agn(optax.sgd(1e-8), every=1, axis_name=replicas.AXIS, combine="sum")
    params = jnp.ones((4, 2), dtype)
    opt_state = jax.vmap(tx.init)(params)
    step = replicas.MAPPINGS["vmap"](lambda p, s, g: tx.update(g, s, p)[1], 4)
    opt_state = step(params, opt_state, jnp.full((4, 2), 0.4 * largest, dtype))
    support.assert_same_bits(optperm.distributed.center_params(opt_state), params)
    assert opt_state.skipped.tolist() == [1] * 4
    opt_state = step(params, opt_state, jnp.full((4, 2), 0.2 * largest, dtype))
    assert opt_state.skipped.tolist() == [1] * 4


def test_a_bad_batch_does_not_lose_a_replica():
    """Optimizers that read the raw gradient get a finite one; others recover with apply_if_finite."""

    def update(updates, norm, params=None, *, grad=None, **extra_args):
        """Keeps the running norm of the raw gradient, and divides by it: 0/0 for a gradient of zeros."""
        norm = 0.5 * norm + 0.5 * optax.tree.norm(updates if grad is None else grad)
        return jax.tree.map(lambda g: -0.1 * g / norm, updates), norm

    momo = optax.GradientTransformationExtraArgs(lambda params: jnp.float32(0.0), update)
    batches = [jnp.full(3, value) for value in (np.nan, 1.0, 1.0)]
    wrapped = optax.apply_if_finite(momo, max_consecutive_errors=10)
    for optimizer, recovers in ((momo, False), (wrapped, True)):
        tx = optperm.agn(optimizer, every=10, outer=optax.sgd(0.1))
        params = jnp.zeros(3)
        opt_state = tx.init(params)
        for batch in batches:
            updates, opt_state = tx.update(batch, opt_state, params, grad=batch)
            params = optax.apply_updates(params, updates)
        assert bool(jnp.isfinite(params).all()) == recovers
        # The state was never poisoned: what is lost without the wrapper is one step of 0/0.
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(opt_state.local_state))


def test_schedules_of_an_outer_optimizer_count_its_own_steps():
    fall = optax.linear_schedule(1.0, 0.0, 6)
    own = optperm.agn(optax.sgd(0.1), every=2, outer=optax.sgd(fall))
    trail = loops.train(own, jnp.zeros(2), [jnp.ones(2)] * 8)
    centers = [s.center[0] for _, s in trail[1::2]]
    np.testing.assert_allclose(centers, np.cumsum([-1.0, -5 / 6, -4 / 6, -3 / 6]), atol=1e-6)


def test_a_schedule_goes_on_where_nobody_took_part():
    tx = optperm.agn(optax.sgd(lambda count: 1.0 / (1 + count)), every=3)
    grads = [jnp.full(1, jnp.nan if step == 0 else 1.0) for step in range(6)]
    opt_state = loops.train(tx, jnp.zeros(1), grads)[-1][1]
    assert jax.tree.leaves(opt_state.center_state) == jax.tree.leaves(opt_state.local_state) == [6]


def test_in_turn_all_replicas_together_advance_a_schedule_by_one_period():
    options = {"axis_name": replicas.AXIS, "combine": "sequential"}
    tx = optperm.agn(optax.sgd(lambda count: 0.1), every=2, **options)
    _, opt_state = run_flagged(tx, grads_of(4), [None] * 4)[-1]
    assert optax.tree.get_all_with_path(opt_state.center_state, "count")[0][1].tolist() == [4] * 4


def test_two_replicas_on_each_of_four_devices_are_eight():
    """By `jax.vmap` within `jax.shard_map`; a step without a flag has no collective."""
    axes, spec, plan = ("device", "each"), P("device"), optperm.distributed.Every(3, 2, 1)
    mesh = jax.make_mesh((4,), ("device",), axis_types=(AxisType.Auto,))
    tx, single = (
        optperm.diloco(optax.adam(0.1), every=plan, mixing=0.5, axis_name=name)
        for name in (axes, replicas.AXIS)
    )
    grads, flags = grads_of(3, size=8), [False, True, False]
    steps = {
        flag: jax.jit(
            jax.shard_map(
                jax.vmap(flagged_step(tx, flag), axis_name="each"),
                mesh=mesh,
                in_specs=spec,
                out_specs=spec,
                check_vma=False,
            )
        )
        for flag in set(flags)
    }
    params, opt_state = (replicas.stack([tree] * 8) for tree in (START, tx.init(START)))
    expected = run_flagged(single, grads, flags)
    for flag, each, (wanted, _) in zip(flags, grads, expected, strict=True):
        params, opt_state = steps[flag](params, opt_state, each)
        support.assert_close(params, wanted, atol=1e-6)
    text = steps[False].lower(params, opt_state, grads[0]).compile().as_text()
    assert "conditional" not in text
    assert not replicas.collectives(text)


COMMITTED_ALONE = {
    "agn mean": functools.partial(optperm.agn, every=100),
    "agn sequential": functools.partial(optperm.agn, every=100, combine="sequential"),
    "diloco": functools.partial(optperm.diloco, every=100),
    "diloco pairs": functools.partial(optperm.diloco, every=100, combine="pairs"),
    "delayed": functools.partial(
        optperm.diloco, every=optperm.distributed.Every(4, 2, 2), mixing=0.25
    ),
    "compressed": functools.partial(
        optperm.diloco, every=100, compress=optperm.distributed.Compression(0.5, bits=4)
    ),
}
EVERYWHERE = ["vmap", "pmap", "shard_map", "shard_map unchecked"]


@pytest.mark.parametrize(
    ("method", "how"),
    support.every_night(
        itertools.product(COMMITTED_ALONE, EVERYWHERE),
        {("agn mean", "shard_map"), ("delayed", "vmap")},
    ),
)
def test_a_commit_alone_equals_a_commit_with_the_last_step(method, how):
    """Local steps, then `commit="only"`: the params and the center of `commit=True` in the last step."""
    tx = COMMITTED_ALONE[method](optax.adam(0.1), axis_name=replicas.AXIS)
    grads = grads_of(5)
    wanted = run_flagged(tx, grads, [None] * 4 + [True], how)[-1]
    nan = jax.tree.map(lambda g: np.full_like(g, np.nan), grads[0])
    trail = run_flagged(tx, [*grads, nan, nan], [None] * 4 + [False, "only", "only"], how)
    # Pairs are drawn from the number of the step, which is the next one.
    if "pairs" not in method:
        support.assert_close(trail[5], wanted, atol=1e-6)
    params, state = trail[5]
    assert state.since_commit.tolist() == [0] * 4
    assert state.count.tolist() == [5] * 4
    support.assert_same_bits(state.local_state, trail[4][1].local_state)
    if method != "delayed":  # whose mixing keeps a part of the local params
        support.assert_same_bits(params, optperm.distributed.center_params(state, final=True))
    # A second one has nothing to bring in: the outer momentum makes no step without a gradient.
    support.assert_same_bits(trail[6], trail[5])


@pytest.mark.parametrize("factory", [optperm.agn, optperm.diloco])
def test_a_commit_alone_in_an_unnamed_vmap_over_seeds(factory):
    """Each training decides by its own steps: the first has made one, the second none."""
    tx = factory(optax.sgd(0.1, momentum=0.9), every=9, axis_name=replicas.AXIS)
    step = flagged_step(tx, False)
    params, opt_state = (replicas.stack([tree] * 4) for tree in (START, tx.init(START)))
    moved = jax.vmap(step, axis_name=replicas.AXIS)(params, opt_state, grads_of(1)[0])
    both = replicas.stack([moved, (params, opt_state)])
    zeros = jax.tree.map(jnp.zeros_like, both[0])
    run = jax.vmap(jax.vmap(flagged_step(tx, "only"), axis_name=replicas.AXIS))
    found = jax.jit(run)(*both, zeros)
    assert found[1].commits.tolist() == [[1] * 4, [0] * 4]
    support.assert_same_bits(replicas.take(found, 1), (params, opt_state))
    support.assert_same_bits(found[0], found[1].center)


def test_a_commit_alone_ends_a_loop_whose_schedules_have_advanced():
    """The center's schedules are at the last step made, as with `commit=True` in it."""
    tx = optperm.agn(optax.sgd(lambda count: 1.0 / (1 + count)), every=100)
    grads = [jax.tree.map(lambda p: np.ones_like(p)[None], START)] * 4
    wanted = run_flagged(tx, grads[:3], [False, False, True])[-1][0]
    found = run_flagged(tx, grads, [False, False, False, "only"])[-1][0]
    support.assert_close(found, wanted, atol=1e-6)


def test_a_commit_alone_of_a_method_that_places_params():
    start = {"w": support.random_params()["kernel"]}
    for tx in (optperm.agn(optperm.sgperm(0.1), every=100),):
        params, opt_state = start, tx.init(start)
        for flag in (False, False, "only", False):
            grads = jax.tree.map(jnp.sin, params)
            updates, opt_state = tx.update(grads, opt_state, params, commit=flag)
            params = optperm.apply_updates(params, updates, opt_state)
            support.assert_permutes(params, start)
            if flag == "only":
                support.assert_same_bits(params, optperm.distributed.center_params(opt_state))
