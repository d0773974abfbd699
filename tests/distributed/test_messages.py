"""Commits as messages: jobs apart against mapped replicas and NumPy, and messages that do not fit."""

import functools
import heapq
import io
import itertools
import pickle

import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import replicas
import support
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm.distributed import (
    Center,
    Compression,
    Contribution,
    center_params,
    contribution,
    init_center,
    merge,
    pull,
    traffic_report,
)

pytestmark = pytest.mark.usefixtures("lenient")

JOBS, PERIOD, AXIS = 3, 3, replicas.AXIS
WEIGHTS = {"equal": (1.0, 1.0, 1.0), "weighted": (0.5, 1.0, 2.5)}
PARAMS = {"a": np.linspace(-1, 1, 8).reshape(4, 2), "b": np.linspace(0, 1, 4), "c": np.array(0.5)}
MOMENTUM, ADAM = optax.sgd(0.05, momentum=0.9), optax.adam(0.05)
NESTEROV = optax.sgd(0.8, momentum=0.5, nesterov=True)
FOUR_BITS, LARGEST = Compression(bits=4), Compression(0.5, bits=2)
SGD = optax.sgd(1.0)


@functools.partial(jax.jit, static_argnums=0)
def local_step(tx, params, opt_state, grads):
    """Take a step of a job that does not commit."""
    updates, opt_state = tx.update(grads, opt_state, params, commit=False)
    return optperm.apply_updates(params, updates, opt_state), opt_state


# The same calls in one program each, where a test is not about calls outside of jax.jit.
sent_by = jax.jit(contribution, static_argnames="compress")
merged = jax.jit(merge, static_argnums=(2, 3))
received = jax.jit(pull)

# The method, inner, outer, how to combine, the compression, and the mixing.
TOGETHER = {
    "agn mean": (optperm.agn, MOMENTUM, ADAM, "mean", None, 0.0),
    "agn sum": (optperm.agn, MOMENTUM, MOMENTUM, "sum", None, 0.0),
    "agn sequential": (optperm.agn, ADAM, MOMENTUM, "sequential", None, 0.0),
    "diloco with adam": (optperm.diloco, ADAM, ADAM, "mean", None, 0.0),
    "diloco with nesterov": (optperm.diloco, MOMENTUM, NESTEROV, "mean", None, 0.0),
    "diloco mixed": (optperm.diloco, MOMENTUM, NESTEROV, "sum", None, 0.25),
    "agn 4 bits": (optperm.agn, MOMENTUM, MOMENTUM, "mean", FOUR_BITS, 0.0),
    "diloco 4 bits": (optperm.diloco, ADAM, NESTEROV, "mean", FOUR_BITS, 0.0),
    "diloco largest": (optperm.diloco, ADAM, NESTEROV, "sequential", LARGEST, 0.0),
}


@pytest.mark.parametrize(
    ("name", "weights"),
    support.every_night(
        itertools.product(TOGETHER, WEIGHTS),
        [("agn mean", "weighted")],
        slow=[("diloco largest", "weighted")],
    ),
)
@pytest.mark.usefixtures("x64")
def test_jobs_that_exchange_at_the_same_step_are_mapped_replicas(name, weights):
    """Params, centers and states of three jobs after each of three commits, to rounding."""
    method, inner, outer, combine, compress, mixing = TOGETHER[name]
    options = {"compress": compress} | ({"mixing": mixing} if mixing else {})
    together = method(inner, outer, every=99, axis_name=AXIS, combine=combine, **options)
    apart = method(inner, outer, every=99, **options)
    rng = np.random.default_rng(0)
    targets = [
        {k: rng.normal(size=(JOBS, *np.shape(p))) for k, p in PARAMS.items()} for _ in range(9)
    ]
    weights = WEIGHTS[weights]

    @jax.jit
    def step(params, opt_state, target, commit):
        def on_replica(p, s, target, w):
            grads = jax.tree.map(jnp.subtract, p, target)
            updates, s = together.update(grads, s, p, commit=commit, weight=w)
            return optperm.apply_updates(p, updates, s), s

        return jax.vmap(on_replica, axis_name=AXIS)(params, opt_state, target, jnp.array(weights))

    own_step = jax.jit(
        lambda p, s, target: local_step(apart, p, s, jax.tree.map(jnp.subtract, p, target))
    )
    start = jax.device_put(PARAMS)
    params = replicas.stack([start] * JOBS)
    opt_state = jax.jit(jax.vmap(together.init))(params)
    jobs = [(start, jax.jit(apart.init)(start))] * JOBS
    center = init_center(start, outer)
    for number, target in enumerate(targets, start=1):
        params, opt_state = step(params, opt_state, target, number % PERIOD == 0)
        jobs = [own_step(*job, replicas.take(target, i)) for i, job in enumerate(jobs)]
        if number % PERIOD:
            continue
        sent = [sent_by(*job, w, compress) for job, w in zip(jobs, weights, strict=True)]
        # A compressed message is read outside of jax.jit.
        merge_all = merged if compress is None else merge
        center = merge_all(center, [message for message, _ in sent], outer, combine)
        jobs = [received(p, s, center, mixing) for (p, _), (_, s) in zip(jobs, sent, strict=True)]
        own = replicas.stack([jax.device_get(job) for job in jobs])
        atol = 1e-12 if compress is None else 1e-6
        chex.assert_trees_all_close(
            (params, center_params(opt_state)), (own[0], own[1].center), atol=atol, rtol=0
        )
        for field in ("local_state", "residual", "commits", "since_commit"):
            found, wanted = getattr(own[1], field), getattr(opt_state, field)
            chex.assert_trees_all_close(wanted, found, atol=atol, rtol=0)
    assert int(center.version) == 3


@pytest.mark.parametrize("combine", ["mean", "sequential"])
@pytest.mark.usefixtures("x64")
def test_jobs_of_unequal_speed_are_workers_of_a_parameter_server(combine):
    """AGN's source in NumPy: each worker sends a / T when it is ready, and waits for nobody."""
    tx, size, speeds = optperm.agn(MOMENTUM, ADAM, every=99), 5, (1.0, 2.0, 3.5)
    start, rng = np.zeros(size), np.random.default_rng(1)
    targets = rng.normal(size=(JOBS, size))
    inner, outer = replicas.sgd(0.05, 0.9), replicas.adam(0.05)
    server, server_state, momenta = start.copy(), None, [None] * JOBS
    workers, pulled = [start.copy() for _ in range(JOBS)], [0] * JOBS
    jobs = [(jax.device_put(start), jax.jit(tx.init)(start))] * JOBS
    center, stale = init_center(jax.device_put(start), optax.adam(0.05)), []
    own_step = jax.jit(lambda p, s, target: local_step(tx, p, s, p - target))
    queue = [(speed, i) for i, speed in enumerate(speeds)]
    for version in range(12):
        clock, i = heapq.heappop(queue)
        heapq.heappush(queue, (clock + speeds[i], i))
        a = np.zeros(size)
        for _ in range(PERIOD + i):  # workers take different numbers of steps
            g = workers[i] - targets[i]
            a, (move, momenta[i]) = a + g, inner(momenta[i], g)
            workers[i] = workers[i] + move
            jobs[i] = own_step(*jobs[i], targets[i])
        move, server_state = outer(server_state, a / (PERIOD + i))
        server = server + move
        message, state = contribution(*jobs[i])
        assert (int(message.steps), int(message.version)) == (PERIOD + i, pulled[i])
        stale.append(int(center.version - message.version))
        center = merged(center, [message], ADAM, combine)
        jobs[i] = received(jobs[i][0], state, center)
        workers[i], pulled[i] = server.copy(), version + 1
        np.testing.assert_allclose(center.params, server, rtol=0, atol=1e-12)
        np.testing.assert_allclose(jobs[i][0], server, rtol=0, atol=1e-12)
    assert max(stale) > 1


@functools.cache
def one_message(method=optperm.diloco, compress=None, steps=2):
    """Return a job's params and state, its message and its state after that, after some steps."""
    tx = method(optax.sgd(0.1), SGD, every=99, compress=compress)
    params = jax.tree.map(np.float32, PARAMS)
    opt_state = jax.jit(tx.init)(params)
    for _ in range(steps):
        params, opt_state = local_step(tx, params, opt_state, jax.tree.map(np.ones_like, params))
    return params, opt_state, *sent_by(params, opt_state, compress=compress)


METHODS = [optperm.agn, optperm.diloco]


@pytest.mark.parametrize(
    ("method", "compress"),
    support.every_night(
        itertools.product(METHODS, [None, FOUR_BITS, Compression(bits=1)]),
        [(optperm.agn, None), (optperm.diloco, FOUR_BITS)],
    ),
)
def test_a_contribution_without_a_step_is_zero_and_changes_nothing(method, compress):
    """Also right after another contribution, which thus is sent once, and after a pull."""
    _, first, message, _ = one_message(method, compress, 0)
    params, _, full, again = one_message(method, compress)
    assert (int(full.steps), float(full.weight)) == (2, 1.0)
    start = init_center(jax.tree.map(np.float32, PARAMS), SGD)
    pulled = received(params, again, merge(start, [full], SGD))
    second, after = sent_by(params, again, compress=compress)
    third, _ = sent_by(*pulled, compress=compress)
    support.assert_same_bits(after, again)
    support.assert_same_bits(sent_by(params, first, compress=compress)[1], first)
    for each in (message, second, third):
        assert (float(each.weight), int(each.steps)) == (0.0, 0)
        assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(each.move))
    center = merge(start, [second, message], SGD)
    support.assert_same_bits(center, start)


def test_what_a_compressed_message_leaves_out_is_held_back():
    """The center moves by what is sent, so its distance from the params is the rest."""
    tx = optperm.diloco(SGD, SGD, every=99, compress=FOUR_BITS)
    start = jax.tree.map(np.float32, PARAMS)
    grads = jax.tree.map(np.square, start)
    params, opt_state = local_step(tx, start, jax.jit(tx.init)(start), grads)
    message, opt_state = sent_by(params, opt_state, compress=FOUR_BITS)
    center = merge(init_center(start, SGD), [message], SGD)
    rest = jax.tree.map(np.subtract, center.params, params)
    assert np.abs(rest["a"]).max() > 1e-2
    chex.assert_trees_all_close(opt_state.residual, rest, atol=1e-6, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_second_contribution_has_only_the_later_steps(method):
    """Nothing moves the params, and the two contributions add up to all steps."""
    tx = method(optax.sgd(0.5), SGD, every=99)
    params, opt_state = jnp.zeros(2), tx.init(jnp.zeros(2))
    params, opt_state = local_step(tx, params, opt_state, jnp.ones(2))
    first, opt_state = contribution(params, opt_state)
    for _ in range(2):
        params, opt_state = local_step(tx, params, opt_state, jnp.ones(2))
    second, _ = contribution(params, opt_state)
    np.testing.assert_allclose(params, [-1.5, -1.5])
    assert (int(first.steps), int(second.steps)) == (1, 2)
    sums = [1.0, 1.0] if method is optperm.agn else [0.5, 1.0]
    np.testing.assert_allclose([first.move[0], second.move[0]], sums)


def test_a_pull_drops_keeps_or_mixes_later_steps():
    tx = optperm.diloco(optax.sgd(1.0), SGD, every=99)
    center = Center(jnp.full(2, 4.0), SGD.init(jnp.zeros(2)), jnp.int32(7))
    params, opt_state = local_step(tx, jnp.zeros(2), tx.init(jnp.zeros(2)), -jnp.ones(2))
    for mixing, wanted in ((0.0, 4.0), (1.0, 1.0), (0.25, 3.25)):
        for run in (pull, jax.jit(pull)):
            new, state = run(params, opt_state, center, mixing)
            np.testing.assert_allclose(new, [wanted] * 2)
            np.testing.assert_allclose(center_params(state, final=True), [4.0] * 2)
            assert int(state.commits) == 7
            assert bool(state.pulled.all()) == (mixing == 0)
    bad = params.at[0].set(jnp.nan)
    np.testing.assert_allclose(pull(bad, opt_state, center, 0.5)[0], [4.0] * 2)


def test_an_older_center_is_refused_or_under_jit_not_taken():
    tx, center = optperm.agn(SGD, every=99), init_center(jnp.zeros(2), SGD)
    job = pull(jnp.ones(2), tx.init(jnp.ones(2)), center._replace(version=jnp.int32(3)))
    older = center._replace(params=jnp.ones(2), version=jnp.int32(2))
    with pytest.raises(ValueError, match=r"version 2, but .* version 3: .*allow_older=True"):
        pull(*job, older)
    support.assert_same_bits(jax.jit(pull)(*job, older), job)
    params, state = pull(*job, older, allow_older=True)
    assert (params.tolist(), int(state.commits)) == ([1.0, 1.0], 2)


def test_a_job_that_has_committed_on_its_own_is_refused():
    tx, center = optperm.agn(SGD, every=1), init_center(jnp.zeros(2), SGD)
    params, opt_state = pull(jnp.zeros(2), tx.init(jnp.zeros(2)), center)
    updates, opt_state = tx.update(jnp.ones(2), opt_state, params)
    with pytest.raises(ValueError, match="Steps without commit=False raise the version"):
        pull(params + updates, opt_state, center)


def test_contributions_that_are_not_finite_or_have_no_weight_are_left_out():
    """Under each rule; if none is left, neither the center nor its version changes."""
    params, _, good, _ = one_message()
    start = init_center(params, MOMENTUM)
    spoil = lambda x: jax.tree.map(lambda leaf: leaf.at[...].set(x), good.move)  # noqa: E731
    bad = [
        good._replace(move=spoil(jnp.nan)),
        good._replace(move=spoil(jnp.inf)),
        *(good._replace(weight=jnp.float32(w)) for w in (0.0, -1.0, jnp.nan, jnp.inf)),
    ]
    last = lambda moves, weights: jax.tree.map(lambda x: x[-1], moves)  # noqa: E731
    for combine in ("mean", "sum", "sequential", last):
        support.assert_same_bits(merge(start, bad, MOMENTUM, combine), start)
        found = merge(start, [*bad, good, *bad], MOMENTUM, combine)
        support.assert_same_bits(found, merge(start, [good], MOMENTUM, combine))
        assert int(found.version) == 1
    huge = good._replace(move=spoil(3e38))
    support.assert_same_bits(merge(start, [huge, huge], MOMENTUM, "sum"), start)


@support.needs_float16
def test_a_move_that_overflows_in_the_dtype_of_the_center_is_left_out():
    """100,000 is finite in float32 only, and its mean with 2 would be finite in float16."""
    tx, start = optperm.diloco(SGD, SGD, every=99), jnp.zeros(2, jnp.float16)
    params, opt_state = local_step(tx, start, tx.init(start), jnp.full(2, 2.0, jnp.float16))
    message, _ = contribution(params, opt_state)
    huge = message._replace(move=jnp.full(2, 1e5, jnp.float32))
    center = merge(init_center(start, SGD), [huge, message], SGD)
    np.testing.assert_array_equal(center.params, [-2.0, -2.0])


def test_a_job_whose_params_are_not_finite_counts_it_and_sends_no_weight():
    params, opt_state, _, _ = one_message()
    params = params | {"b": params["b"].at[0].set(jnp.nan)}
    message, state = contribution(params, opt_state)
    assert (float(message.weight), int(state.skipped)) == (0.0, 1)


def test_a_message_counts_each_time_that_it_is_merged():
    """The transport delivers it once: a sum has it twice, a mean has the same mean."""
    params, _, message, _ = one_message()
    start = init_center(jax.tree.map(jnp.zeros_like, params), SGD)
    twice = merge(start, [message, message], SGD, "sum").params
    chex.assert_trees_all_close(twice, jax.tree.map(lambda x: -2 * x, message.move), rtol=0)
    support.assert_same_bits(
        merge(start, [message, message], SGD).params, merge(start, [message], SGD).params
    )


def test_a_function_combines_the_contributions_with_a_weight():
    """Coordinate-wise medians, which one job cannot move far."""
    params, _, message, _ = one_message()
    start = init_center(jax.tree.map(jnp.zeros_like, params), SGD)
    sent = [
        message._replace(move=jax.tree.map(lambda x, k=k: k * x, message.move))
        for k in (1, 2, 1000, -1000, 3)
    ]

    def median(moves, weights):
        assert weights.shape == (5,)
        return jax.tree.map(lambda x: jnp.median(x, axis=0), moves)

    dropped = message._replace(weight=jnp.float32(0.0))
    found = merge(start, [*sent, dropped], SGD, median)
    chex.assert_trees_all_close(found.params, jax.tree.map(lambda x: -2 * x, message.move), rtol=0)
    with pytest.raises(ValueError, match=r"outside jax\.jit"):
        jax.jit(lambda c, m: merge(c, [m], SGD, median))(start, message)
    with pytest.raises(ValueError, match=r"the result of combine has a different tree"):
        merge(start, sent, SGD, lambda moves, weights: moves["a"])


def without(tree, name):
    return {key: leaf for key, leaf in tree.items() if key != name}


MISFITS = {
    "torn": (lambda m: m._replace(move=without(m.move, "b")), r"\.move.*'b'\] is missing"),
    "another model": (
        lambda m: m._replace(move=m.move | {"b": jnp.zeros(5)}),
        r"\.move\['b'\] is float32\[5\], but the center has float32\[4\]",
    ),
    "another dtype": (
        lambda m: m._replace(move=jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.move)),
        r"\.move\['a'\] must be float32 or float64",
    ),
    "integers": (
        lambda m: m._replace(move=jax.tree.map(lambda x: x.astype(jnp.int32), m.move)),
        r"\.move\['a'\] must be float32 or float64",
    ),
    "another method": (lambda _: one_message(optperm.agn)[2], r"has method=0.*has method=1"),
    "another compression": (
        lambda _: one_message(compress=FOUR_BITS)[2],
        r"bits=4, but contributions\[0\] has .*bits=0",
    ),
    "options of another compression": (
        lambda m: one_message(compress=FOUR_BITS)[2]._replace(options=m.options),
        r"\.move has a different tree",
    ),
    "unknown options": (lambda m: m._replace(options=jnp.full(3, 9.0)), r"has unknown options"),
    "weights of several jobs": (lambda m: m._replace(weight=jnp.ones(2)), r"\.weight must have"),
    "a dict": (lambda m: m._asdict(), r"must be an optperm\.distributed\.Contribution, got a dict"),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_message_that_does_not_fit_is_named(name):
    params, _, message, _ = one_message()
    change, wanted = MISFITS[name]
    with pytest.raises(ValueError, match=rf"contributions\[1\].*{wanted}"):
        merge(init_center(params, SGD), [message, change(message)], SGD)


def test_a_compressed_message_of_another_model_is_named():
    params, _, message, _ = one_message(compress=FOUR_BITS)
    center = init_center(params | {"b": jnp.zeros(40)}, SGD)
    with pytest.raises(ValueError, match=r"contributions\[0\]\.move\['b'\].*is uint8\[4\]"):
        merge(center, [message], SGD)
    with pytest.raises(ValueError, match=r"contributions\[0\] is compressed.*outside jax\.jit"):
        jax.jit(lambda c, m: merge(c, [m], SGD))(init_center(params, SGD), message)


def through_pickle(tree):
    return pickle.loads(pickle.dumps(jax.device_get(tree)))


def through_npz(tree):
    file = io.BytesIO()
    np.savez(file, *jax.device_get(jax.tree.leaves(tree)))
    file.seek(0)
    with np.load(file, allow_pickle=False) as read:
        return jax.tree.unflatten(jax.tree.structure(tree), list(read.values()))


def through_flax(tree):
    return flax.serialization.from_bytes(tree, flax.serialization.to_bytes(tree))


@pytest.mark.parametrize(
    ("through", "compress"),
    support.in_turns([through_pickle, through_npz, through_flax], [None, FOUR_BITS, LARGEST]),
)
def test_messages_and_centers_are_arrays_that_travel(through, compress):
    """What arrives merges and is pulled to the same bits."""
    params, opt_state, message, _ = one_message(compress=compress)
    center = init_center(params, MOMENTUM)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((message, center)))
    arrived = through(message)
    assert isinstance(arrived, Contribution)
    wanted = merge(merge(center, [message], MOMENTUM), [message], MOMENTUM)
    found = merge(through(merge(through(center), [arrived], MOMENTUM)), [arrived], MOMENTUM)
    support.assert_same_bits(found, wanted)
    support.assert_same_bits(
        received(params, opt_state, through(found)), received(params, opt_state, wanted)
    )


def test_messages_travel_through_orbax(tmp_path):
    checkpoint = pytest.importorskip("orbax.checkpoint")
    _, _, message, _ = one_message(compress=FOUR_BITS)
    with checkpoint.StandardCheckpointer() as saver:
        saver.save(tmp_path / "message", message)
        saver.wait_until_finished()
        arrived = saver.restore(tmp_path / "message", message)
    assert isinstance(arrived, Contribution)
    support.assert_same_bits(arrived, message)


@pytest.mark.parametrize(
    ("method", "compress"),
    support.in_turns(METHODS, [None, FOUR_BITS, LARGEST, Compression(0.1)]),
)
def test_a_message_has_the_bytes_that_the_traffic_report_says(method, compress):
    """Its move and its weight; version, steps and options are 20 bytes for any model.

    An all-gather pads what is compressed to whole 1,024 bytes, which a message does not."""
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in {"a": (70, 30), "b": (30,), "c": (70, 30), "d": (0, 2)}.items()
    }
    tx = method(SGD, SGD, every=99, axis_name=AXIS, compress=compress)
    wanted = traffic_report(tx, params, axis_name=AXIS, every=99).all.bytes_per_commit
    apart = method(SGD, SGD, every=99, compress=compress)

    def send(params):
        return contribution(params, apart.init(params), compress=compress)[0]

    message = jax.eval_shape(send, params)
    count = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))  # noqa: E731
    found = count((message.move, message.weight))
    assert (found if compress is None else -(-found // 1024) * 1024) == wanted
    assert count(message) == found + 20


@pytest.mark.parametrize(
    ("kind", "compress"),
    support.every_night(
        itertools.product((AxisType.Auto, AxisType.Explicit), (None, FOUR_BITS)),
        [(AxisType.Explicit, None)],
        slow=[(AxisType.Auto, FOUR_BITS)],
    ),
)
def test_a_sharded_job_sends_and_pulls_as_a_job_on_one_device(kind, compress):
    """Params and state keep their shardings, and the center may be on the host."""
    tx = optperm.diloco(MOMENTUM, NESTEROV, every=99, compress=compress)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",), axis_types=(kind,))
    start = {"w": support.normal((4, 2)), "b": support.normal((4, 2), 1)}
    center = init_center(start, NESTEROV)

    send = functools.partial(contribution, compress=compress)

    def run(params, send=send, pull=pull):
        params, opt_state = local_step(tx, params, jax.jit(tx.init)(params), params)
        message, opt_state = send(params, opt_state)
        merge_all = merged if compress is None else merge
        new = merge_all(center, [jax.device_get(message)], NESTEROV)
        return message, new, pull(params, opt_state, jax.device_get(new))

    sharded = jax.device_put(start, NamedSharding(mesh, P("model")))
    # XLA shards the results of a compiled call as it likes on an automatic mesh.
    calls = map(jax.jit, (send, pull)) if kind == AxisType.Explicit else (send, pull)
    with jax.set_mesh(mesh):
        found = run(sharded, *calls)
        inside = merge(init_center(sharded, NESTEROV), [found[0]], NESTEROV)
    wanted = run(start, *map(jax.jit, (send, pull)))
    chex.assert_trees_all_close(jax.device_get(found), jax.device_get(wanted), atol=1e-6, rtol=0)
    chex.assert_trees_all_close(
        jax.device_get(inside), jax.device_get(wanted[1]), atol=1e-6, rtol=0
    )
    for leaf in jax.tree.leaves((found[2][0], found[2][1].center, inside.params)):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), leaf.ndim)


def test_a_job_inside_other_transformations_trains_its_part():
    """A masked part in a chain, bfloat16 params, and a center in float32."""
    job = optperm.diloco(SGD, SGD, every=99, center_dtype="float32")
    tx = optax.chain(optax.clip(10.0), optax.masked(job, {"w": True, "b": False}))
    params = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16)}
    opt_state = tx.init(params)
    center = init_center(center_params(opt_state), SGD)
    grads = jax.tree.map(jnp.ones_like, params)
    updates, opt_state = tx.update(grads, opt_state, params, commit=False)
    params = optax.apply_updates(params, updates)
    message, opt_state = contribution(params, opt_state)
    center = merge(center, [message], optax.sgd(0.5))
    new, opt_state = pull(params, opt_state, center)
    assert center.params["w"].dtype == jnp.float32
    support.assert_same_bits(new["b"], params["b"])
    assert (new["w"].tolist(), new["w"].dtype) == ([0.5, 0.5], jnp.bfloat16)


def test_masks_of_a_job_hold_after_a_pull():
    """An entry that the job keeps at zero stays zero, though the center of others has moved it."""
    inner = optax.chain(optax.sgd(0.1), optperm.mask_elements())
    tx = optperm.diloco(inner, SGD, every=99)
    params = {"w": np.linspace(1, 2, 8, dtype=np.float32).reshape(2, 4)}
    prune = functools.partial(optperm.sparsity.prune, sparsity=0.5)
    params, opt_state = jax.jit(lambda p: prune(p, tx.init(p)))(params)
    params, opt_state = local_step(tx, params, opt_state, jax.tree.map(jnp.ones_like, params))
    zero = np.asarray(params["w"]) == 0
    assert zero.sum() == 4
    center = init_center(jax.tree.map(jnp.ones_like, params), SGD)
    new, state = pull(params, opt_state, center)
    np.testing.assert_array_equal(new["w"], np.where(zero, 0.0, 1.0))
    support.assert_same_bits(center_params(state), new)


def test_copies_that_are_looked_at_contribute_nothing():
    """A final commit on a copy, as `fit` makes for an evaluation, leaves the job's next message."""
    params, opt_state, message, _ = one_message()
    tx = optperm.diloco(optax.sgd(0.1), SGD, every=99)
    _, copy = jax.jit(functools.partial(tx.update, commit="only"))(params, opt_state, params)
    center_params(copy, final=True)
    support.assert_same_bits(contribution(params, opt_state)[0], message)


def test_states_and_centers_share_no_buffers():
    """So that each may be donated."""
    tx, start = optperm.agn(MOMENTUM, every=99), jnp.arange(3.0)
    center = init_center(start, MOMENTUM)
    params, opt_state = pull(start + 1, tx.init(start), center)
    _, sent = contribution(params, opt_state)
    trees = (start, center, params, opt_state)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(trees)]
    assert len(set(pointers)) == len(pointers)
    assert sent.center.unsafe_buffer_pointer() != params.unsafe_buffer_pointer()


def test_messages_work_under_jit():
    """Contributions, merges and pulls in one program are those outside of it, to rounding."""
    params, opt_state, _, _ = one_message()
    center = init_center(params, NESTEROV)

    def all_of_it(params, opt_state, center):
        message, opt_state = contribution(params, opt_state, 2.0)
        center = merge(center, [message, message], NESTEROV, "sum")
        return center, pull(params, opt_state, center)

    found = jax.jit(all_of_it)(params, opt_state, center)
    chex.assert_trees_all_close(found, all_of_it(params, opt_state, center), atol=1e-6, rtol=0)


@pytest.mark.parametrize("outer", [optax.adam(0.1), optax.sgd(10.0)], ids=["moments", "params"])
def test_a_huge_message_does_not_move_the_center_nor_its_optimizer(outer):
    """Its squares, or the step, are no numbers of the dtype, although the message is finite."""
    params = {"a": jnp.ones(3)}
    tx = optperm.diloco(optax.sgd(0.1), outer, every=100)
    updates, state = tx.update(params, tx.init(params), params, commit=False)
    message, _ = contribution(optperm.apply_updates(params, updates, state), state)
    huge = message._replace(move=jax.tree.map(lambda x: jnp.full_like(x, 1e38), message.move))
    center = init_center(params, outer)
    for function in (merge, jax.jit(merge, static_argnums=2)):
        after = function(center, [huge], outer)
        support.assert_same_bits(jax.tree.leaves(after), jax.tree.leaves(center))
        assert function(center, [message], outer).version == 1
