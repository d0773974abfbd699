"""Layouts of a run: sharded states, replicas, and each method compared with a loop by hand."""

import contextlib
import re
import types

import chex
import fitting
import jax
import jax.numpy as jnp
import loops
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
from optperm.training._data import Position
from optperm.training._run import Run
from optperm.training._schedule import Schedule

IN, HIDDEN, OUT = 16, 32, 4
DATA = fitting.make_data(IN, OUT)


def dense_params():
    kernels = {"in": support.normal((IN, HIDDEN)), "out": support.normal((HIDDEN, OUT), seed=1)}
    kernels = {name: np.float32(0.3) * np.asarray(kernel) for name, kernel in kernels.items()}
    return {"bias": np.zeros(HIDDEN, np.float32), **kernels}


def dense_loss(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["in"] + params["bias"])
    return fitting.cross_entropy(hidden @ params["out"], batch["y"])


def dense_fit(tx, params=None, train_data=DATA, **options):
    """Of arrays, or of given batches."""
    params = dense_params() if params is None else params
    options = {"epochs": 2, "batch_size": BATCH if train_data is DATA else None, **options}
    return fitting.linear_fit(dense_loss, train_data, tx, params, **options)


def batches_of(*sizes):
    cuts = np.cumsum(sizes)[:-1]
    parts = {key: np.split(leaf[: sum(sizes)], cuts) for key, leaf in DATA.items()}
    return [{key: parts[key][i] for key in parts} for i in range(len(sizes))]


def assert_close(result, other):
    chex.assert_trees_all_close(result.state.params, other.state.params, rtol=1e-5, atol=1e-5)


def assert_same_params(result, other):
    trained = (jax.tree.map(np.asarray, each.state.params) for each in (result, other))
    support.assert_same_bits(*trained)


def lies(leaf, wanted):
    """Return whether an array has its sharding on the user's mesh, with the user's types of axes."""
    return leaf.sharding.mesh == wanted.mesh and leaf.sharding.is_equivalent_to(wanted, leaf.ndim)


def shard(axis_type):
    """Return a mesh of one axis, and the placement of the params on it by their output units."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    specs = {"in": P(None, "data"), "bias": P("data"), "out": P(None, "data")}
    return mesh, {key: NamedSharding(mesh, spec) for key, spec in specs.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis_type"),
    [("adam", AxisType.Explicit), ("svrg", AxisType.Auto)],
)
def test_sharded_state_that_is_trained_and_resumed_stays_sharded(name, axis_type, tmp_path):
    """On four devices as on one."""
    options = {"eval_fn": lambda *of: {"loss": dense_loss(*of)}, "eval_data": DATA}
    options["epoch_start"] = fitting.every_second if name == "svrg" else None
    tx, (mesh, wanted) = fitting.method(name), shard(axis_type)
    params, alone = jax.device_put(dense_params(), wanted), dense_fit(tx, **options)
    seen, where = [], {"checkpoints": tmp_path, "checkpoint_every": 4}
    note = {10: lambda event: seen.append(event.state)}
    with jax.set_mesh(mesh) if axis_type == AxisType.Explicit else contextlib.nullcontext():
        spread = dense_fit(tx, params, every=note, **where, **options)
    assert_close(spread, alone)
    evaluated = [result.history.epochs["eval_loss"] for result in (spread, alone)]
    np.testing.assert_allclose(*evaluated, rtol=1e-5)
    for state in (spread.state, seen[0]):
        assert all(lies(leaf, wanted[key]) for key, leaf in state.params.items())
        big = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.shape == (IN, HIDDEN)]
        assert big
        assert all(lies(leaf, wanted["in"]) for leaf in big)
    resumed = dense_fit(tx, params, checkpoints=tmp_path, resume=4, **options)
    assert_same_params(resumed, spread)


def compile_step(where, state):
    """The text of one compiled step in a layout."""
    with where.context():
        carry = steps.place_state(state, where)
        (batch,) = batches_of(BATCH)
        batch = where.put_batch(batch, local=False)
        one = steps.compile_steps(steps.Model(dense_loss), where, carry, rows=1)[1]
        return jax.jit(one).lower(carry, (), batch).compile().as_text()


def test_step_gathers_no_whole_parameter_that_the_model_does_not():
    """The compiled step has only the gathers of the loss and its gradient, by their shapes."""
    placement = shard(AxisType.Auto)[1]
    params = jax.device_put(dense_params(), placement)
    state = training.TrainState.create(apply_fn=None, params=params, tx=fitting.method("svrg"))
    where = layout.choose_layout(state.tx, state)
    (batch,) = batches_of(BATCH)
    with where.context():
        model = jax.jit(jax.value_and_grad(dense_loss), out_shardings=(None, placement))
        lowered = model.lower(where.place(params), where.put_batch(batch, local=False))
        texts = [compile_step(where, state), lowered.compile().as_text()]
    pattern = r"= (\S+) (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    moved = [{shape.split("{")[0] for shape in re.findall(pattern, text)} for text in texts]
    whole = {f"f32[{IN},{HIDDEN}]", f"f32[{HIDDEN},{OUT}]"}
    assert moved[0] & whole <= moved[1] & whole, moved


@pytest.mark.slow
def test_tensor_parallel_params_beside_a_sharded_batch():
    mesh = jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])
    specs = {"in": P(None, "model"), "bias": P("model"), "out": P("model")}
    placement = {key: NamedSharding(mesh, spec) for key, spec in specs.items()}
    params = jax.device_put(dense_params(), placement)
    with jax.set_mesh(mesh):
        spread = dense_fit(fitting.method("adam"), params, mesh=mesh)
    assert spread.state.params["in"].sharding.spec == P(None, "model")
    assert_close(spread, dense_fit(fitting.method("adam")))
    # With the sharding of a batch, and with replicas that are spread over two devices each.
    named = dense_fit(fitting.method("adam"), mesh=NamedSharding(mesh, P("model")))
    assert_close(named, spread)
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name="data")
    both = dense_fit(tx, params, opt_state=None, mesh=mesh, axis_name="data")
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name="replica")
    assert_close(both, dense_fit(tx, **fitting.on(2, mapped=True)))
    other = jax.make_mesh((2,), ("data",), devices=jax.devices()[4:6])
    with pytest.raises(ValueError, match=r"params.*is on .*pass the mesh of the state"):
        dense_fit(fitting.method("adam"), params, mesh=other)


@pytest.mark.slow
def test_mapped_sampler_is_its_loop_by_hand():
    """On four devices, which also initialize the optimizer state."""
    tx = optperm.mandt_sgd(EXAMPLES, BATCH, axis_name="replica", max_step=0.03)
    result = dense_fit(tx, opt_state=None, **fitting.on(4, mapped=True))
    step = loops.make_step(tx, loops.evaluation(dense_loss, axis_name="replica"))
    specs = {"in_specs": (P(), P(), P("replica")), "out_specs": (P(), P())}
    mapped = jax.jit(jax.shard_map(step, mesh=fitting.on(4)["mesh"], **specs))
    params, opt_state = dense_params(), tx.init(dense_params())
    for batch in fitting.all_batches(2, source=DATA, replace=True):
        params, opt_state = mapped(params, opt_state, batch)
    trained = jax.tree.map(np.asarray, result.state.params)
    chex.assert_trees_all_close(trained, jax.device_get(params), rtol=2e-4, atol=2e-5)
    plain = dense_fit(optax.sgd(0.1)).state.params
    assert np.abs(trained["in"] - plain["in"]).max() > 1e-3


@pytest.mark.slow
def test_basis_of_mapped_dldr_is_spread_over_devices():
    """Four devices take the steps of one; each holds its rows of the basis."""

    def dldr(axis_name):
        second = optperm.project(optax.sgd(0.5), n_components=2, axis_name=axis_name)
        return optperm.dldr(optax.sgd(0.5), second, every=1, num_snapshots=4)

    alone = dense_fit(dldr(None))
    with fitting.runs() as made:
        spread = dense_fit(dldr("replica"), opt_state=None, **fitting.on(4, mapped=True))
    losses = [result.history.steps["loss"] for result in (spread, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-3, atol=1e-5)
    assert made[0].carry.opt_state.second.subspace.rows["in"].shape[:2] == (4, 1)


@pytest.mark.slow
def test_batch_statistics_and_dropout_see_the_whole_batch():
    """Without a mapped axis four devices are one, dropout and BatchNorm included."""
    results = [fitting.fit("linen", "svrg", epochs=2, devices=n) for n in (None, 4)]
    losses = [result.history.steps["loss"] for result in results]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    stats = [jax.device_get(result.state.model_state) for result in results]
    chex.assert_trees_all_close(*stats, rtol=1e-4, atol=1e-6)
    placed = fitting.fit("linen", "sgperm", epochs=2, devices=4)
    support.assert_permutes(placed.state.params, fitting.variables()["params"])


@pytest.mark.slow
def test_evaluation_shares_each_batch():
    """Batches that devices cannot share equally included."""
    shapes = []

    def metrics(params, batch):
        shapes.append(batch["x"].shape[0])
        return {"loss": dense_loss(params, batch)}

    (data,) = batches_of(38)
    options = {"eval_fn": metrics, "eval_data": data, "eval_batch_size": 10, "epochs": 1}
    spread = dense_fit(fitting.method("adam"), **fitting.on(4), **options)
    assert set(shapes) == {8, 6}  # the last one on every device
    exact = dense_loss(jax.device_get(spread.state.params), data)
    np.testing.assert_allclose(spread.history.last["eval_loss"], exact, rtol=1e-5)


@pytest.mark.slow
def test_batch_that_devices_do_not_divide_is_computed_on_each_of_them():
    """Its mean is over its examples all the same; replicas cannot share it, which is refused."""
    parts, adam = batches_of(16, 7), fitting.method("adam")
    assert_close(dense_fit(adam, None, parts), dense_fit(adam, None, parts, **fitting.on(4)))
    with pytest.raises(ValueError, match="has 7 examples, which 4 replicas cannot share equally"):
        dense_fit(fitting.method("agn", "replica"), train_data=parts, **fitting.on(4, mapped=True))


def hosts(devices):
    """A mesh of two hosts with some devices each, and the sharding of a batch over all of them."""
    shape, axes = (2, devices), ("host", "device")
    mesh = jax.make_mesh(shape, axes, devices=jax.devices()[: 2 * devices])
    return NamedSharding(mesh, P(axes))


LOCAL = optperm.diloco(optax.adam(1e-2), every=3, axis_name="host")


def test_devices_of_a_host_step_together_between_commits_of_hosts():
    """As hosts of one device, which are apart after the ninth step of ten."""
    tx = optperm.diloco(optax.sgd(0.1), every=3, axis_name="host")
    with fitting.runs() as made:
        both = fitting.linear_fit(tx=tx, epochs=2, mesh=hosts(2), axis_name="host")
    alone = fitting.linear_fit(tx=tx, epochs=2, mesh=hosts(1), axis_name="host")
    assert_close(both, alone)
    losses = [result.history.steps["loss"] for result in (both, alone)]
    np.testing.assert_allclose(*losses, rtol=1e-5, atol=1e-6)
    weights = made[0].carry.params["w"]
    assert weights.shape == (2, fitting.FEATURES, fitting.CLASSES)
    assert np.ptp(weights, axis=0).max() > 1e-3
    plain = fitting.linear_fit(tx=optax.sgd(0.1), epochs=2)
    assert np.abs(losses[0] - plain.history.steps["loss"]).max() > 1e-3


@pytest.mark.slow
def test_hosts_of_two_devices_resume_and_take_batches_that_devices_do_not_divide(tmp_path):
    """On a plain mesh, whose first axis alone divides batches, the devices of a host do the same."""
    options = {"axis_name": "host", "checkpoints": tmp_path, "checkpoint_every": 4}
    both = dense_fit(LOCAL, mesh=hosts(2), **options)
    assert_close(both, dense_fit(LOCAL, mesh=hosts(2).mesh, axis_name="host"))
    assert_same_params(dense_fit(LOCAL, mesh=hosts(2), resume=4, **options), both)
    parts, options = batches_of(16, 6), {"epochs": 4, "axis_name": "host"}
    assert_close(*(dense_fit(LOCAL, train_data=parts, mesh=hosts(n), **options) for n in (1, 2)))


# The devices of a host, in each notation of a compiled program.
OF_A_HOST = r"replica_groups=(\{\{0,1\},\{2,3\}\}|\[2,2\]<=\[4\](?!T)|mesh\[[^]]*\] ?\{'device'\})"


@pytest.mark.slow
def test_hosts_exchange_only_in_a_commit():
    """A compiled step has collectives over hosts only in a branch of a conditional."""
    state = training.TrainState.create(apply_fn=None, params=dense_params(), tx=LOCAL)
    text = compile_step(layout.choose_layout(state.tx, state, hosts(2), "host"), state)
    collective = r".*(?:all-reduce|all-gather|permute|all-to-all)(?:-start)?\(.*"
    within, across = 0, set()
    for computation in re.split(r"\n(?=\S)", text):
        name = computation.removeprefix("ENTRY ").split(" ")[0]
        for line in re.findall(collective, computation):
            is_within = re.search(OF_A_HOST, line) is not None
            within += is_within
            across |= set() if is_within else {name}
    branches = re.findall(r"conditional\(.*branch_computations=\{(.*?)\}", text)
    assert within
    assert across
    assert across <= {name for found in branches for name in found.split(", ")}


def test_metrics_that_replicas_compute_apart_are_averaged():
    """Counts and flags are the largest, and what all replicas share stays."""
    mesh = jax.make_mesh((2,), ("replica",), axis_types=(AxisType.Auto,))

    def merge(apart, alike):
        mine = {"loss": apart[0], "count": apart[0].astype(jnp.int32), "flag": apart[0] > 2}
        return layout.average_varying({**mine, "alike": alike})

    mapped = jax.shard_map(merge, mesh=mesh, in_specs=(P("replica"), P()), out_specs=P())
    found = jax.device_get(jax.jit(mapped)(jnp.array([1.0, 4.0]), jnp.array(7.0)))
    assert found == {"loss": 2.5, "count": 4, "flag": True, "alike": 7.0}


@pytest.mark.parametrize(
    ("period", "done", "count"),
    [
        (0, 0, 100),
        (60, 0, 60),
        (30, 0, 90),
        (30, 45, 75),
        (500, 0, 500),
        (500, 100, 400),
        (3000, 0, 1000),
    ],
)
def test_call_of_several_processes_ends_with_a_commit(period, done, count):
    """Where replicas wait for each other anyway; a call has at most 1000 steps."""
    given = types.SimpleNamespace(schedule=Schedule(epochs=9))
    at, last = Position(done), done - done % period if period else 0
    own = types.SimpleNamespace(period=period, last_commit=last, at=at, given=given)
    assert Run._count_steps(own) == count


def test_period_is_the_number_of_steps_between_commits():
    with fitting.runs() as made:
        fitting.linear_fit(
            tx=fitting.method("agn", "replica"), steps=7, **fitting.on(2, mapped=True)
        )
    made[0]._find_period()
    assert (made[0].period, made[0].last_commit, made[0].commits) == (3, 6, 2)
