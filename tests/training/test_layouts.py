"""Where a run lies: sharded states, replicas, and each method beside a loop by hand."""

import contextlib
import functools
import re

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import BATCH, EXAMPLES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optperm
from optperm import training
from optperm.training import _layout as layout
from optperm.training import _steps as steps

IN, HIDDEN, OUT = 16, 32, 4


def dense_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, IN)).astype(np.float32)
    return {"x": x, "y": np.argmax(x[:, :OUT], axis=1).astype(np.int32)}


def dense_params():
    keys = jax.random.split(jax.random.key(0))
    return {
        "in": 0.3 * jax.random.normal(keys[0], (IN, HIDDEN)),
        "bias": jnp.zeros(HIDDEN),
        "out": 0.3 * jax.random.normal(keys[1], (HIDDEN, OUT)),
    }


def dense_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
    return fitting.cross_entropy(hidden @ params["out"], batch["y"])


def sampler(axis_name=None):
    """Constant SGD that looks at each example, as batch statistics do not allow."""
    return optperm.mandt_sgd(
        EXAMPLES,
        BATCH,
        burn_in=4,
        burn_in_optimizer=optax.sgd(0.1),
        max_step=0.03,
        axis_name=axis_name,
    )


def method(name, axis_name=None):
    return sampler(axis_name) if name == "constant_sgd" else fitting.method(name, axis_name)


def dense_fit(tx, params=None, **options):
    params = dense_params() if params is None else params
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    options = {"epochs": 2, "batch_size": BATCH, **options}
    return training.fit(state, dense_loss, dense_data(), **options)


def close(result, other, rtol=1e-5):
    for one, two in zip(
        jax.tree.leaves(result.state.params), jax.tree.leaves(other.state.params), strict=True
    ):
        np.testing.assert_allclose(np.asarray(one), np.asarray(two), rtol=rtol, atol=rtol)


def lies(leaf, wanted):
    """Whether an array lies as it should, on the mesh of the user with its types of axes."""
    return leaf.sharding.mesh == wanted.mesh and leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


SHARDINGS = {
    "input": {"in": P("data"), "bias": P(), "out": P("data")},
    "output": {"in": P(None, "data"), "bias": P("data"), "out": P(None, "data")},
}


@pytest.mark.parametrize(
    ("name", "sharding", "axis_type"),
    [
        ("adam", "input", AxisType.Explicit),
        pytest.param("svrg", "output", AxisType.Auto, marks=pytest.mark.chains),
        pytest.param("constant_sgd", "output", AxisType.Auto, marks=pytest.mark.exhaustive),
    ],
)
def test_a_sharded_state_stays_sharded(name, sharding, axis_type, tmp_path):
    """On four devices as on one: trained, evaluated, kept and gone on with."""
    options = {"epoch_start": optperm.variance.take_snapshot} if name == "svrg" else {}
    options |= {
        "eval_fn": lambda params, batch: {"loss": dense_loss(params, batch)},
        "eval_data": dense_data(),
    }
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    wanted = {key: NamedSharding(mesh, spec) for key, spec in SHARDINGS[sharding].items()}
    params = jax.device_put(dense_params(), wanted)
    alone = dense_fit(method(name), **options)
    is_explicit = axis_type == AxisType.Explicit
    with jax.set_mesh(mesh) if is_explicit else contextlib.nullcontext():
        seen = []
        spread = dense_fit(
            method(name),
            params,
            checkpoints=tmp_path,
            checkpoint_every=4,
            every={10: lambda event: seen.append(event.state)},
            **options,
        )
    close(spread, alone)
    evaluated = [result.history.epochs["eval_loss"] for result in (spread, alone)]
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    for state in (spread.state, seen[0]):
        assert all(lies(leaf, wanted[key]) for key, leaf in state.params.items())
        big = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (IN, HIDDEN)]
        assert big
        assert all(lies(leaf, wanted["in"]) for leaf in big)
    resumed = dense_fit(method(name), params, checkpoints=tmp_path, resume=4, **options)
    support.assert_same_bits(
        *(jax.tree.map(np.asarray, result.state.params) for result in (resumed, spread))
    )


@pytest.mark.parametrize(
    "name", ["adam", "svrg", pytest.param("constant_sgd", marks=pytest.mark.chains)]
)
def test_a_step_gathers_no_whole_parameter_that_the_model_does_not(name):
    """The gathers of the compiled step are those of the loss and its gradient alone, by their shapes."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    wanted = {key: NamedSharding(mesh, spec) for key, spec in SHARDINGS["output"].items()}
    params = jax.device_put(dense_params(), wanted)
    state = training.TrainState.create(apply_fn=None, params=params, tx=method(name))
    where = layout.choose_layout(state.tx, state)
    with where.context():
        carry = where.place(state)
        batch = where.put_batch({k: v[:BATCH] for k, v in dense_data().items()}, local=False)
        one = steps.compile_steps(steps.Model(dense_loss), where, carry, rows=1)[1]
        model = jax.jit(jax.value_and_grad(dense_loss), out_shardings=(None, wanted))
        texts = [
            jax.jit(one).lower(carry, (), batch).compile().as_text(),
            model.lower(carry.params, batch).compile().as_text(),
        ]
    pattern = r"= (\S+) (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    moved = [{shape.split("{")[0] for shape in re.findall(pattern, text)} for text in texts]
    whole = {f"f32[{IN},{HIDDEN}]", f"f32[{HIDDEN},{OUT}]"}
    assert moved[0] & whole <= moved[1] & whole, moved


@pytest.mark.chains
def test_tensor_parallel_params_beside_a_sharded_batch():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    specs = {"in": P(None, "model"), "bias": P("model"), "out": P("model")}
    params = jax.device_put(
        dense_params(), {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    )
    with jax.set_mesh(mesh):
        spread = dense_fit(fitting.method("adam"), params, mesh=mesh)
    assert spread.state.params["in"].sharding.spec == P(None, "model")
    close(spread, dense_fit(fitting.method("adam")))
    # By the sharding of a batch, and replicas each of which is spread over two devices.
    named = dense_fit(fitting.method("adam"), mesh=NamedSharding(mesh, P("model")))
    close(named, spread)
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name="data")
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx, opt_state=None)
    options = {"epochs": 2, "batch_size": BATCH, "axis_name": "data"}
    both = training.fit(state, dense_loss, dense_data(), mesh=mesh, **options)
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name="replica")
    close(both, dense_fit(tx, **fitting.on(2, mapped=True)))
    other = jax.make_mesh((2,), ("data",), devices=jax.devices()[4:6])
    with pytest.raises(ValueError, match=r"params.*lies on .*pass the mesh of the state"):
        dense_fit(fitting.method("adam"), params, mesh=other)


def by_hand(name, size, start):
    """The params after two epochs of a jitted `shard_map` step and a commit, as a user writes them."""
    mapped = name in ("agn", "diloco", "constant_sgd")
    tx = method(name, "replica" if mapped else None)
    is_local = name in ("agn", "diloco")
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:size]), ("replica",))

    def step(params, opt_state, batch, **options):
        averaged = None if is_local else "replica"
        if is_local:
            params, opt_state = jax.tree.map(lambda leaf: leaf[0], (params, opt_state))
        e = optperm.evaluate(dense_loss, params, batch, axis_name=averaged)
        update = optax.with_extra_args_support(tx).update
        updates, opt_state = update(e.grad, opt_state, params, **e.extra_args, **options)
        params = optperm.apply_updates(params, updates, opt_state)
        if is_local:
            params, opt_state = jax.tree.map(lambda leaf: leaf[None], (params, opt_state))
        return params, opt_state

    spec = P("replica") if is_local else P()
    specs = {"in_specs": (spec, spec, P("replica")), "out_specs": (spec, spec)}
    jitted = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    params, opt_state = start, tx.init(start)
    if is_local:
        copies = (params, opt_state)
        params, opt_state = jax.tree.map(lambda leaf: jnp.stack([leaf] * size), copies)
    for epoch in (1, 2):
        if name == "svrg":
            grad = optperm.variance.full_gradient(dense_loss, params, [dense_data()])
            opt_state = optperm.variance.take_snapshot(opt_state, params, grad)
        is_sampler = name == "constant_sgd"
        order = np.asarray(training.shuffled(0, epoch, EXAMPLES, replace=is_sampler))
        for hand in order.reshape(-1, BATCH):
            batch = {key: leaf[hand] for key, leaf in dense_data().items()}
            params, opt_state = jitted(params, opt_state, batch)
    if is_local:
        finish = functools.partial(step, commit="only")
        finished = jax.jit(jax.shard_map(finish, mesh=mesh, **specs))
        opt_state = finished(params, opt_state, batch)[1]
        return jax.tree.map(
            lambda leaf: leaf[0], optperm.distributed.center_params(opt_state, final=True)
        )
    return params


PLAIN = [optax.sgd(0.05), optax.sgd(0.1)]


CHAINS = [
    pytest.param(name, marks=pytest.mark.chains) for name in ("svrg", "sgperm", "constant_sgd")
]


@pytest.mark.parametrize("name", ["agn", *CHAINS])
def test_every_method_is_its_loop_by_hand_and_not_sgd(name):
    """Four devices; from weights that can all be permuted."""
    start = jax.tree.map(
        lambda leaf: leaf + 0.01 * jnp.arange(leaf.size).reshape(leaf.shape) / 99, dense_params()
    )
    mapped = name in ("agn", "diloco", "constant_sgd")
    options = {"epoch_start": optperm.variance.take_snapshot} if name == "svrg" else {}
    options |= fitting.on(4, mapped=mapped)
    result = dense_fit(method(name, "replica" if mapped else None), start, **options)
    np.testing.assert_equal(result.step, 10)
    hand = by_hand(name, 4, start)
    for key, leaf in result.state.params.items():
        np.testing.assert_allclose(np.asarray(leaf), np.asarray(hand[key]), rtol=2e-4, atol=2e-5)
    for sgd in PLAIN:
        plain = dense_fit(sgd, start)
        far = [np.ptp(result.state.params[k] - jax.device_get(plain.state.params[k])) for k in hand]
        assert max(far) > 1e-3


def test_local_steps_are_found_without_a_state():
    """A state whose optimizer's is still to be initialized trains as the one that has it."""
    tx = fitting.method("agn", "replica")
    state = training.TrainState.create(apply_fn=None, params=dense_params(), tx=tx, opt_state=None)
    options = {"epochs": 2, "batch_size": BATCH, **fitting.on(4, mapped=True)}
    with fitting.runs() as made:
        late = training.fit(state, dense_loss, dense_data(), **options)
    early = dense_fit(tx, **fitting.on(4, mapped=True))
    support.assert_same_bits(
        *(jax.tree.map(np.asarray, result.state.params) for result in (late, early))
    )
    assert made[0].layout.own


@pytest.mark.chains
def test_batch_statistics_and_dropout_see_the_whole_batch():
    """Without a mapped axis four devices are one, dropout and BatchNorm included."""
    results = [fitting.fit("linen", "svrg", epochs=2, devices=n) for n in (None, 4)]
    losses = [result.history.steps["loss"] for result in results]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    stats = [jax.tree.leaves(result.state.model_state) for result in results]
    for one, other in zip(*stats, strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=1e-4, atol=1e-6)
    placed = fitting.fit("linen", "sgperm", epochs=2, devices=4)
    support.assert_permutes(placed.state.params, fitting.variables()["params"])


def test_evaluation_shares_each_batch():
    """Batches that devices cannot share equally included."""
    shapes = []

    def metrics(params, batch):
        shapes.append(batch["x"].shape[0])
        return {"loss": dense_loss(params, batch)}

    data = {key: leaf[:38] for key, leaf in dense_data().items()}
    options = {"eval_fn": metrics, "eval_data": data, "eval_batch_size": 10, "epochs": 1}
    spread = dense_fit(fitting.method("adam"), **fitting.on(4), **options)
    assert set(shapes) == {8, 6}  # the last one on every device
    exact = dense_loss(jax.device_get(spread.state.params), data)
    np.testing.assert_allclose(spread.history.last["eval_loss"], exact, rtol=1e-5)


def test_a_batch_that_devices_do_not_divide_is_computed_on_each_of_them():
    """Its mean is over its examples all the same; replicas cannot share it, which is refused."""
    data = dense_data()
    parts = [{k: v[low:high] for k, v in data.items()} for low, high in ((0, 16), (16, 23))]
    state = training.TrainState.create(
        apply_fn=None, params=dense_params(), tx=fitting.method("adam")
    )
    results = [
        training.fit(state, dense_loss, parts, epochs=2, **fitting.on(devices))
        for devices in (None, 4)
    ]
    close(*results)
    tx = optperm.agn(optax.sgd(0.1), every=2, axis_name="replica")
    state = training.TrainState.create(apply_fn=None, params=dense_params(), tx=tx)
    with pytest.raises(ValueError, match="has 7 examples, of which 4 replicas need equally many"):
        training.fit(state, dense_loss, parts, epochs=2, **fitting.on(4, mapped=True))


def hosts(devices):
    """A mesh of two hosts with some devices each, and the sharding of a batch over all of them."""
    shape, axes = (2, devices), ("host", "device")
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: 2 * devices])
    return NamedSharding(mesh, P(axes))


LOCAL = {
    "diloco": lambda: optperm.diloco(optax.adam(1e-2), every=3, axis_name="host"),
    "agn": lambda: optperm.agn(optax.sgd(0.1), every=3, axis_name="host"),
}


def test_devices_of_a_host_step_together_between_commits_of_hosts():
    """As hosts of one device, which are apart after the ninth step of ten."""
    with fitting.runs() as made:
        both = dense_fit(LOCAL["diloco"](), mesh=hosts(2), axis_name="host")
    alone = dense_fit(LOCAL["diloco"](), mesh=hosts(1), axis_name="host")
    close(both, alone)
    losses = [result.history.steps["loss"] for result in (both, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)
    kernels = made[0].carry.params["in"]
    assert kernels.shape == (2, IN, HIDDEN)
    assert np.ptp(kernels, axis=0).max() > 1e-3
    assert np.abs(losses[0] - dense_fit(optax.adam(1e-2)).history.steps["loss"]).max() > 1e-3


@pytest.mark.chains
@pytest.mark.parametrize("name", [*LOCAL])
def test_hosts_of_two_devices_resume_and_take_batches_that_devices_do_not_divide(name, tmp_path):
    """On a plain mesh, whose first axis alone divides batches, the devices of a host do the same."""
    options = {"axis_name": "host", "checkpoints": tmp_path, "checkpoint_every": 4}
    both = dense_fit(LOCAL[name](), mesh=hosts(2), **options)
    close(both, dense_fit(LOCAL[name](), mesh=hosts(2).mesh, axis_name="host"))
    resumed = dense_fit(LOCAL[name](), mesh=hosts(2), resume=4, **options)
    support.assert_same_bits(
        *(jax.tree.map(np.asarray, result.state.params) for result in (resumed, both))
    )
    parts = [{k: v[low:high] for k, v in dense_data().items()} for low, high in ((0, 16), (16, 22))]
    state = training.TrainState.create(apply_fn=None, params=dense_params(), tx=LOCAL[name]())
    streams = [
        training.fit(state, dense_loss, parts, epochs=4, mesh=hosts(n), axis_name="host")
        for n in (1, 2)
    ]
    close(*streams)


def device_groups(line):
    """The groups of devices that a collective of a compiled program joins, as sorted tuples."""
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        ids = np.arange(np.prod(list(sizes.values()))).reshape(*sizes.values())
        joined = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        ids = np.moveaxis(ids, joined, range(-len(joined), 0))
        rows = ids.reshape(-1, np.prod([ids.shape[i] for i in range(-len(joined), 0)]))
    elif iota := re.search(r"replica_groups=\[(.*?)\]<=\[(.*?)\](?:T\((.*?)\))?", line):
        shape, dims, order = (
            [int(n) for n in text.split(",")] if text else None for text in iota.groups()
        )
        rows = np.arange(np.prod(dims)).reshape(dims).transpose(order).reshape(shape)
    else:
        written = re.search(r"replica_groups=\{(\{.*?\})\}", line)[1]
        rows = [[int(n) for n in group.split(",")] for group in re.findall(r"\{(.*?)\}", written)]
    return {tuple(sorted(map(int, row))) for row in rows}


def test_hosts_exchange_only_in_a_commit():
    """A compiled step has collectives over hosts only in a branch of a conditional."""
    state = training.TrainState.create(apply_fn=None, params=dense_params(), tx=LOCAL["diloco"]())
    where = layout.choose_layout(state.tx, state, hosts(2), "host")
    with where.context():
        carry = steps.place_state(state, where)
        batch = where.put_batch({k: v[:BATCH] for k, v in dense_data().items()}, local=False)
        one = steps.compile_steps(steps.Model(dense_loss), where, carry, rows=1)[1]
        text = jax.jit(one).lower(carry, (), batch).compile().as_text()
    within, across = {}, {}
    for computation in re.split(r"\n(?=\S)", text):
        name = computation.removeprefix("ENTRY ").split(" ")[0]
        for line in re.findall(
            r".*(?:all-reduce|all-gather|permute|all-to-all)(?:-start)?\(.*", computation
        ):
            same_host = device_groups(line) == {(0, 1), (2, 3)}
            (within if same_host else across).setdefault(name, []).append(line)
    branches = {
        name
        for found in re.findall(r"conditional\(.*branch_computations=\{(.*?)\}", text)
        for name in found.split(", ")
    }
    assert within
    assert across
    assert across.keys() <= branches, across


def test_metrics_that_replicas_compute_apart_are_averaged():
    """Counts and flags are the largest, and what all replicas share stays."""
    mesh = jax.make_mesh((2,), ("replica",), axis_types=(AxisType.Auto,))

    def merge(apart, alike):
        mine = {"loss": apart[0], "count": apart[0].astype(jnp.int32), "flag": apart[0] > 2}
        return layout.average_varying({**mine, "alike": alike})

    mapped = jax.shard_map(merge, mesh=mesh, in_specs=(P("replica"), P()), out_specs=P())
    found = jax.device_get(jax.jit(mapped)(jnp.array([1.0, 4.0]), jnp.array(7.0)))
    assert found == {"loss": 2.5, "count": 4, "flag": True, "alike": 7.0}
