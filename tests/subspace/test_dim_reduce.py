"""Quasi-Newton steps in a subspace: golden sequences, replicas, trials, what is not finite, errors."""

import functools
import re

import dim_reduce_reference as golden
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import orbax.checkpoint
import pytest
import replicas
import support
import valley
from jax.flatten_util import ravel_pytree
from valley import batches, rows, start

import optperm

pytestmark = pytest.mark.usefixtures("lenient")


def with_basis(tx, k, params=None):
    """A state with the first rows of a basis."""
    return optperm.set_basis(tx.init(start() if params is None else params), rows(k))


def train(tx, data, k=None, **options):
    """Params and state after each step, on one device: with such a basis, or from a state."""
    if "opt_state" not in options:
        options["opt_state"] = with_basis(tx, k)
    return loops.train(tx, start(), data, **{"evaluate": valley.evaluate} | options)


def train_replicas(tx, params, basis, batches, *, how, size, evaluate=valley.evaluate):
    """The same on replicas that are initialized where they live, and the state that they begin with."""
    init = replicas.MAPPINGS[how](lambda p: optperm.set_basis(tx.init(p), basis), size)
    params = replicas.stack([params] * size)
    opt_state = init(params)
    trail = loops.train(
        tx, params, batches, evaluate=evaluate, how=how, size=size, opt_state=opt_state
    )
    return trail, opt_state


def gradient():
    """At the start, on one batch."""
    return jax.grad(valley.loss_fn)(start(), batches(1)[0, 0])


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_sequences(case):
    """Params, accepted step lengths and values of the reference, to 1e-9 in float64."""
    with jax.enable_x64(True):
        data = golden.load(case)
        tx = golden.optimizer(data)
        params = golden.split(jnp.asarray(data["x0"]))
        opt_state = optperm.set_basis(tx.init(params), golden.split(data["P"]))
        evaluate = loops.evaluation(golden.loss_of(data))
        trail = loops.train(tx, params, data["noise"], evaluate=evaluate, opt_state=opt_state)
        params, lengths = golden.outcome(trail)
        np.testing.assert_allclose(params, data["params"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(lengths, data["step"], rtol=0, atol=1e-9)
        assert len(np.unique(lengths)) > 1


@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
@pytest.mark.parametrize("size", [1, 3])
def test_golden_sequences_with_the_basis_spread_over_devices(size, mapping):
    """The same to 1e-9 on 1 and on 3 devices, with 8 rows on 3 of them."""
    with jax.enable_x64(True):
        data = golden.load("stiff")
        trail, opt_state = train_replicas(
            golden.optimizer(data, axis_name=replicas.AXIS),
            golden.split(data["x0"]),
            golden.split(data["P"]),
            np.repeat(data["noise"][:, None], size, axis=1),
            how=mapping,
            size=size,
            evaluate=loops.evaluation(golden.loss_of(data)),
        )
        assert opt_state.subspace.rows["v"].shape[1] == -(-8 // size)
        params, lengths = golden.outcome(trail)
        for index in range(size):
            np.testing.assert_allclose(params[:, index], data["params"], rtol=0, atol=1e-9)
            np.testing.assert_allclose(lengths[:, index], data["step"], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("k", "sizes"), [(5, (2, 4)), (2, (4,)), (1, (4,))])
def test_any_number_of_devices_gives_the_same_trajectory(k, sizes):
    """Each has its share of one batch and of the rows; the params agree with one device's to 1e-5."""
    data = batches(8, 12)
    options = {"n_components": k, "alpha": 1e-3, "max_search_steps": 12}
    alone = train(optperm.dim_reduce(**options), data.reshape(8, -1, 6), k)
    assert alone[-1][1].step_length > 0
    tx = optperm.dim_reduce(**options, axis_name=replicas.AXIS)
    for size in sizes:
        shares = data.reshape(8, size, -1, 6)
        trail, _ = train_replicas(tx, start(), rows(k), shares, how="pmap", size=size)
        for (params, _), (wanted, _) in zip(trail, alone, strict=True):
            for index in range(size):
                chosen = replicas.take(params, index)
                support.assert_close(chosen, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_a_scan_carries_it_under_every_mapping(mapping):
    """Eight steps in one scan within the mapped function give the steps one by one."""
    size, data = 3, batches(8, 3)
    options = {"n_components": 4, "max_search_steps": 5}
    tx = optperm.dim_reduce(optax.adam(0.1), **options, axis_name=replicas.AXIS)

    def whole(params, batches):
        step = loops.make_step(tx, valley.evaluate)
        return loops.carry(step, params, with_basis(tx, 4, params), batches)[0]

    stacked = replicas.stack([start()] * size)
    got = replicas.MAPPINGS[mapping](whole, size)(stacked, np.swapaxes(data, 0, 1))
    alone = optperm.dim_reduce(optax.adam(0.1), **options)
    wanted, _ = train(alone, data.reshape(8, -1, 6), 4)[-1]
    for index in range(size):
        support.assert_close(replicas.take(got, index), wanted, atol=1e-5, rtol=1e-7)


def test_collectives_of_a_step():
    """The average, an all-gather of the rows' products, one sum of both lifts, and each trial's loss."""
    size, k = 4, 6
    tx = optperm.dim_reduce(n_components=k, axis_name=replicas.AXIS)
    pmap = replicas.MAPPINGS["pmap"]
    params = replicas.stack([start()] * size)
    opt_state = pmap(lambda p: with_basis(tx, k, p), size)(params)
    step = pmap(loops.make_step(tx, valley.evaluate), size)
    text = step.lower(params, opt_state, batches(1, size)[0]).compile().as_text()
    found = re.findall(r"= \(?(f32\[[\d,]*\])\S* (all-reduce|all-gather)", text)
    # 6 params and the loss; 2 of 6 products each, padded to 8; 2 vectors of 6; the loss of a trial.
    assert sorted(found) == sorted(
        [
            ("f32[7]", "all-reduce"),
            ("f32[8]", "all-gather"),
            ("f32[12]", "all-reduce"),
            ("f32[]", "all-reduce"),
        ]
    )


def test_accepted_at_once_costs_one_evaluation():
    """The line search evaluates the loss as often as it tries, and no more."""
    calls = []

    def counted(value):
        def value_fn(params):
            jax.debug.callback(lambda v: calls.append(float(v)), value)
            return jnp.float32(value)

        return value_fn

    tx = optperm.dim_reduce(n_components=2, max_search_steps=6)
    opt_state = with_basis(tx, 2)
    for trial, expected in ((-1e9, 1), (1e9, 6)):
        calls.clear()
        update = jax.jit(functools.partial(tx.update, value_fn=counted(trial)))
        jax.block_until_ready(update(gradient(), opt_state, start(), value=0.0))
        jax.effects_barrier()
        assert len(calls) == expected


def test_rejected_trials_leave_no_trace():
    """After five rejected trials Adam's state is that of the one update that was made."""
    inner = optax.adam(0.1)
    tx = optperm.dim_reduce(inner, n_components=2, alpha=0.3, max_search_steps=5)
    opt_state = with_basis(tx, 2)
    updates, after = tx.update(
        gradient(), opt_state, start(), value=0.0, value_fn=lambda params: jnp.float32(1e9)
    )
    assert after.step_length == 0
    direction = jax.tree.map(lambda m: 0.3 * m, after.residual)
    wanted_updates, wanted_state = inner.update(direction, inner.init(start()), start())
    support.assert_close((updates, after.inner_state), (wanted_updates, wanted_state), rtol=1e-7)
    for name in ("inverse_hessian", "last_gradient", "has_last", "last_move"):
        support.assert_same_bits(getattr(after, name), getattr(opt_state, name))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trial_that_is_not_finite_is_rejected(bad):
    """The next, shorter one is taken if it is low enough; with none the params stay in the subspace."""
    tx = optperm.dim_reduce(n_components=3, alpha=0.0, max_search_steps=3, rho=0.5)
    opt_state, grads = with_basis(tx, 3), gradient()
    whole = np.linalg.norm(valley.flat(rows(3)) @ ravel_pytree(grads)[0])

    def value_fn(params):
        moved = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)))
        return jnp.where(moved > 0.75 * whole, bad, -1e6)

    updates, after = tx.update(grads, opt_state, start(), value=0.0, value_fn=value_fn)
    assert after.step_length == 0.5
    assert after.has_last
    moved = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(updates)))
    np.testing.assert_allclose(moved, 0.5 * whole, rtol=1e-5)
    updates, after = tx.update(
        grads, opt_state, start(), value=0.0, value_fn=lambda params: jnp.float32(bad)
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert not after.has_last


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    """Everything but the count stays, and the next step is the one that would have been taken."""
    tx = optperm.dim_reduce(optax.adam(0.1), n_components=4, max_search_steps=10)
    step, data = loops.compiled(tx, valley.evaluate), batches(4)[:, 0]
    params, opt_state = train(tx, data[:2], 4)[-1]
    spoiled = data[2].copy()
    spoiled[0, 3] = bad
    after, state_after = step(params, opt_state, spoiled)
    support.assert_same_bits(after, params)
    unchanged = opt_state._replace(count=opt_state.count + 1, step_length=jnp.zeros([]))
    support.assert_same_bits(state_after, unchanged)
    support.assert_same_bits(
        step(after, state_after, data[3])[0], step(params, opt_state, data[3])[0]
    )


def test_optax_line_search_stays_at_zero_after_one_nan_and_this_does_not():
    """A peer beside it: after one spoiled batch Optax's search moves no more, this one converges."""
    searching = optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=15)
    )
    ours = optperm.dim_reduce(n_components=6, max_search_steps=15)
    target = np.ones((2, 6), np.float32)
    spoiled = np.where(np.arange(6) == 2, np.float32(np.nan), target)
    data = [target, spoiled, *[target] * 58]
    by_optax, _ = train(searching, data, opt_state=searching.init(start()))[-1]
    by_ours, _ = train(ours, data, 6)[-1]
    assert valley.loss_fn(by_ours, target) < 1e-6
    assert not valley.loss_fn(by_optax, target) < 1.0


def test_before_a_basis_is_set_only_the_residual_moves():
    """It is gradient descent with momentum bit for bit, and evaluates nothing."""
    tx = optperm.dim_reduce(n_components=2, gamma=0.5, alpha=0.1)
    extras = {"value": 1.0, "value_fn": lambda p: jnp.float32(-1e9)}

    def evaluate(params, batch):
        return jax.grad(valley.loss_fn)(params, batch), extras

    options = {"evaluate": evaluate, "how": "eager"}
    trail = train(tx, batches(3)[:, 0], opt_state=tx.init(start()), **options)
    assert all(opt_state.step_length == 0 for _, opt_state in trail)
    wanted = loops.train(optax.sgd(0.1, 0.5), start(), batches(3)[:, 0], **options)
    support.assert_same_bits([p for p, _ in trail], [p for p, _ in wanted])


def test_without_the_residual_params_stay_in_the_subspace():
    """Alpha of 0 is pure P-BFGS: it reaches the optimum of the subspace, and nothing outside it."""
    tx = optperm.dim_reduce(n_components=3, alpha=0.0, max_search_steps=20)
    params, _ = train(tx, [np.ones((2, 6), np.float32)] * 40, 3)[-1]
    p = valley.flat(rows(3)).astype(np.float64)
    best = np.linalg.solve(p @ (valley.SCALES[:, None] * p.T), p @ valley.SCALES) @ p
    np.testing.assert_allclose(np.append(params["a"], params["b"]), best, atol=1e-3)


def test_relative_curvature_does_not_depend_on_the_scale_of_the_loss():
    """With tiny losses of tiny params the absolute test keeps B as it was; the relative one learns."""

    def tiny(params, batch):
        return 1e-45 * valley.loss_fn(jax.tree.map(lambda leaf: 1e20 * leaf, params), batch)

    evaluate = loops.evaluation(tiny)
    learned = {}
    with jax.enable_x64(True):
        params = jax.tree.map(np.float64, start())
        for curvature in ("absolute", "relative"):
            tx = optperm.dim_reduce(n_components=6, alpha=0.0, curvature=curvature)
            opt_state = with_basis(tx, 6, params)
            trail = loops.train(
                tx, params, [np.ones((2, 6))] * 3, evaluate=evaluate, opt_state=opt_state
            )
            learned[curvature] = not np.array_equal(trail[-1][1].inverse_hessian, np.eye(6))
    assert learned == {"absolute": False, "relative": True}


def test_schedules_and_injected_hyperparameters():
    """Numbers may be schedules of the step, or be changed between steps."""
    make = optax.inject_hyperparams(optperm.dim_reduce, static_args=("n_components",))
    injected = make(n_components=2, alpha=0.1)
    scheduled = optperm.dim_reduce(n_components=2, alpha=lambda count: 0.1 / (1 + count))
    data = batches(3)[:, 0]
    params, opt_state = start(), injected.init(start())
    for count, batch in enumerate(data):
        opt_state.hyperparams["alpha"] = jnp.float32(0.1 / (1 + count))
        params, opt_state = loops.compiled(injected, valley.evaluate)(params, opt_state, batch)
    wanted, _ = train(scheduled, data, opt_state=scheduled.init(start()))[-1]
    support.assert_close(params, wanted, rtol=1e-6)


def test_set_basis_in_any_nesting_forgets_the_old_curvature():
    """It finds the state in a chain inside a partition, and starts B anew."""
    tx = optax.chain(optax.clip(1e6), optperm.dim_reduce(n_components=3, max_search_steps=20))
    _, opt_state = train(tx, batches(4)[:, 0], 3)[-1]
    assert not np.array_equal(opt_state[1].inverse_hessian, np.eye(3))
    again = optperm.set_basis(opt_state, jax.tree.map(lambda r: r.astype(jnp.bfloat16), rows(3, 1)))
    assert np.array_equal(again[1].inverse_hessian, np.eye(3))
    assert not again[1].has_last
    support.assert_same_bits(again[1].residual, opt_state[1].residual)
    assert {leaf.dtype for leaf in jax.tree.leaves(again[1].subspace.rows)} == {np.dtype("float32")}
    support.assert_close(again[1].subspace.rows, rows(3, 1), atol=5e-3, rtol=1e-7)


def test_set_basis_maps_over_replicas():
    """A state of 4 replicas takes the full basis; each keeps its own rows, those past k are zero."""
    tx = optperm.dim_reduce(n_components=5, axis_name=replicas.AXIS)
    opt_state = jax.pmap(tx.init, axis_name=replicas.AXIS, devices=jax.devices()[:4])(
        replicas.stack([start()] * 4)
    )
    for set_basis in (
        jax.vmap(optperm.set_basis, in_axes=(0, None)),
        jax.pmap(optperm.set_basis, in_axes=(0, None), devices=jax.devices()[:4]),
    ):
        held = set_basis(opt_state, rows(5)).subspace.rows["a"]
        assert held.shape == (4, 2, 5, 1)
        np.testing.assert_array_equal(np.concatenate(held)[:5], rows(5)["a"])
        assert not np.any(np.concatenate(held)[5:])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_basis_goes_to_another_run_through_orbax(dtype, tmp_path):
    """One run samples and saves, another loads and goes on, from float32 or bfloat16 files."""
    recorder = optax.chain(optax.sgd(1e-3), optperm.record_trajectory(every=2, capacity=8))
    data = [np.ones((2, 6), np.float32)]
    _, opt_state = train(recorder, data * 16, opt_state=recorder.init(start()))[-1]
    snapshots, count = optperm.trajectory(opt_state)
    basis = optperm.pca_basis(snapshots, 3, num_snapshots=count)
    saved = jax.tree.map(lambda leaf: leaf.astype(dtype), (snapshots, basis))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "run", {"trajectory": saved[0], "basis": saved[1]})
        checkpointer.wait_until_finished()
        loaded = checkpointer.restore(tmp_path / "run")
    support.assert_same_bits((loaded["trajectory"], loaded["basis"]), saved)
    tx = optperm.dim_reduce(n_components=3, max_search_steps=20)
    tolerance = 1e-6 if dtype == jnp.float32 else 3e-2
    for basis_again in (loaded["basis"], optperm.pca_basis(loaded["trajectory"], 3)):
        opt_state = optperm.set_basis(tx.init(start()), basis_again)
        if basis_again is loaded["basis"]:
            support.assert_close(opt_state.subspace.rows, basis, atol=tolerance, rtol=1e-7)
        train(tx, data, opt_state=opt_state)


def test_a_basis_has_orthonormal_rows():
    """Longer, equal or slanted ones are refused; zero ones, and what bfloat16 rounds off, are not."""
    tx = optperm.dim_reduce(n_components=3)
    opt_state, basis = tx.init(start()), rows(3)
    for index, factor in ((0, 1.01), (2, 0.5)):
        scale = np.ones((3,), np.float32)
        scale[index] = factor
        long = {"a": basis["a"] * scale[:, None, None], "b": basis["b"] * scale}
        with pytest.raises(ValueError, match=rf"orthonormal.* rows {index} and {index} is"):
            optperm.set_basis(opt_state, long)
    with pytest.raises(ValueError, match=r"rows 0 and 1 is 1, 1 from 0, where 0.001 is allowed"):
        optperm.set_basis(opt_state, jax.tree.map(lambda r: r[np.array([0, 0, 2])], basis))
    fewer = jax.tree.map(lambda r: r * np.float32([1, 1, 0]).reshape(3, *[1] * (r.ndim - 1)), basis)
    coarse = jax.tree.map(lambda r: r.astype(jnp.bfloat16), basis)
    for fine in (fewer, coarse):
        assert optperm.set_basis(opt_state, fine).subspace.is_set
    jax.jit(optperm.set_basis)(opt_state, long)  # not seen there
