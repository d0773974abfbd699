"""Quasi-Newton steps in a subspace: golden sequences, replicas, trials, what is not finite, errors."""

import functools
import re

import dim_reduce_reference as golden
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
import replicas
import support

import optperm

pytestmark = pytest.mark.usefixtures("lenient")

SCALES = np.float32([1.0, 3.0, 10.0, 30.0, 100.0, 300.0])


def valley(params, batch):
    """A quadratic with its minimum at the mean of the batch."""
    x = jnp.concatenate([params["a"].ravel(), params["b"][None]])
    return 0.5 * jnp.mean(jnp.sum(SCALES * (x - batch) ** 2, axis=-1))


def start():
    return {"a": np.zeros((5, 1), np.float32), "b": np.float32(0.0)}


def rows(k, seed=0):
    """Orthonormal rows over the valley's params."""
    q = np.linalg.qr(np.random.default_rng(seed).normal(size=(6, 6)))[0][:k].astype(np.float32)
    return {"a": q[:, :5].reshape(k, 5, 1), "b": q[:, 5]}


def batches(steps, size, seed=0):
    """For each step two examples for each of `size` replicas."""
    rng = np.random.default_rng(seed)
    return 1 + 0.3 * rng.normal(size=(steps, size, 2, 6)).astype(np.float32)


def one_step(tx, loss_fn=valley):
    @jax.jit
    def step(params, opt_state, batch):
        e = optperm.evaluate(loss_fn, params, batch)
        updates, opt_state = tx.update(e.grad, opt_state, params, **e.extra_args)
        return optperm.apply_updates(params, updates, opt_state), opt_state

    return step


def begin(tx, params, basis, size, mapping="pmap"):
    """Params and state of `size` replicas, initialized where they live."""
    init = replicas.MAPPINGS[mapping](lambda p: optperm.set_basis(tx.init(p), basis), size)
    stacked = replicas.stack([params] * size)
    return stacked, init(stacked)


@pytest.mark.parametrize("case", golden.CASES)
def test_golden_sequences(case):
    """Params, accepted step lengths and values of the reference, to 1e-9 in float64."""
    with jax.enable_x64(True):
        data = golden.load(case)
        tx = golden.optimizer(data)
        params = golden.split(jnp.asarray(data["x0"]))
        opt_state = optperm.set_basis(tx.init(params), golden.split(data["P"]))
        step = jax.jit(golden.steps(tx, golden.loss_of(data)))
        params, lengths = golden.run(data["noise"], step, params, opt_state)
        np.testing.assert_allclose(params, data["params"], rtol=0, atol=1e-9)
        np.testing.assert_allclose(lengths, data["step"], rtol=0, atol=1e-9)
        assert len(np.unique(lengths)) > 1


@pytest.mark.parametrize("mapping", ["pmap", "shard_map"])
@pytest.mark.parametrize("size", [1, 3])
def test_golden_sequences_with_the_basis_spread_over_devices(size, mapping):
    """The same to 1e-9 on 1 and on 3 devices, with 8 rows on 3 of them."""
    with jax.enable_x64(True):
        data = golden.load("stiff")
        tx = golden.optimizer(data, axis_name=replicas.AXIS)
        params = golden.split(data["x0"])
        params, opt_state = begin(tx, params, golden.split(data["P"]), size, mapping)
        assert opt_state.subspace.rows["v"].shape[1] == -(-8 // size)
        step = replicas.MAPPINGS[mapping](golden.steps(tx, golden.loss_of(data)), size)
        noise = np.repeat(data["noise"][:, None], size, axis=1)
        params, lengths = golden.run(noise, step, params, opt_state)
        for index in range(size):
            np.testing.assert_allclose(params[:, index], data["params"], rtol=0, atol=1e-9)
            np.testing.assert_allclose(lengths[:, index], data["step"], rtol=0, atol=1e-9)


@pytest.mark.parametrize(("k", "sizes"), [(5, (1, 2, 3, 4)), (2, (1, 4)), (1, (4,))])
def test_any_number_of_devices_gives_the_same_trajectory(k, sizes):
    """Each has its share of one batch and of the rows; the params agree with one device's to 1e-5."""
    data = batches(8, 12)
    options = {"n_components": k, "alpha": 1e-3, "max_search_steps": 12}
    tx = optperm.dim_reduce(**options)
    params, opt_state = start(), optperm.set_basis(tx.init(start()), rows(k))
    alone, step = [], one_step(tx)
    for batch in data:
        params, opt_state = step(params, opt_state, batch.reshape(-1, 6))
        alone.append(params)
    assert opt_state.step_length > 0
    tx = optperm.dim_reduce(**options, axis_name=replicas.AXIS)
    for size in sizes:
        params, opt_state = begin(tx, start(), rows(k), size)
        step = replicas.MAPPINGS["pmap"](one_step(tx), size)
        for batch, wanted in zip(data, alone, strict=True):
            params, opt_state = step(params, opt_state, batch.reshape(size, -1, 6))
            for index in range(size):
                jax.tree.map(
                    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
                    replicas.take(params, index),
                    wanted,
                )


@pytest.mark.parametrize("mapping", replicas.MAPPINGS)
def test_a_scan_carries_it_under_every_mapping(mapping):
    """Eight steps in one scan within the mapped function give the steps one by one."""
    size, data = 3, batches(8, 3)
    tx = optperm.dim_reduce(
        optax.adam(0.1), n_components=4, max_search_steps=5, axis_name=replicas.AXIS
    )

    def whole(params, batches):
        def body(carry, batch):
            return one_step(tx)(*carry, batch), None

        opt_state = optperm.set_basis(tx.init(params), rows(4))
        return jax.lax.scan(body, (params, opt_state), batches)[0][0]

    stacked = replicas.stack([start()] * size)
    got = replicas.MAPPINGS[mapping](whole, size)(stacked, np.swapaxes(data, 0, 1))
    alone = optperm.dim_reduce(optax.adam(0.1), n_components=4, max_search_steps=5)
    params, opt_state = start(), optperm.set_basis(alone.init(start()), rows(4))
    step = one_step(alone)
    for batch in data:
        params, opt_state = step(params, opt_state, batch.reshape(-1, 6))
    for index in range(size):
        chosen = replicas.take(got, index)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), chosen, params)


def test_collectives_of_a_step():
    """The average, an all-gather of the rows' products, one sum of both lifts, and each trial's loss."""
    size, k = 4, 6
    tx = optperm.dim_reduce(n_components=k, axis_name=replicas.AXIS)
    params, opt_state = begin(tx, start(), rows(k), size)
    step = jax.pmap(one_step(tx), axis_name=replicas.AXIS, devices=jax.devices()[:size])
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
        def count(v):
            calls.append(float(v))

        def value_fn(params):
            jax.debug.callback(count, value)
            return jnp.float32(value)

        return value_fn

    tx = optperm.dim_reduce(n_components=2, max_search_steps=6)
    opt_state = optperm.set_basis(tx.init(start()), rows(2))
    grads = jax.grad(valley)(start(), batches(1, 1)[0, 0])
    for trial, expected in ((-1e9, 1), (1e9, 6)):
        calls.clear()
        update = jax.jit(functools.partial(tx.update, value_fn=counted(trial)))
        jax.block_until_ready(update(grads, opt_state, start(), value=0.0))
        jax.effects_barrier()
        assert len(calls) == expected


def test_rejected_trials_leave_no_trace():
    """After five rejected trials Adam's state is that of the one update that was made."""
    inner = optax.adam(0.1)
    tx = optperm.dim_reduce(inner, n_components=2, alpha=0.3, max_search_steps=5)
    opt_state = optperm.set_basis(tx.init(start()), rows(2))
    grads = jax.grad(valley)(start(), batches(1, 1)[0, 0])
    updates, after = tx.update(
        grads, opt_state, start(), value=0.0, value_fn=lambda params: jnp.float32(1e9)
    )
    assert after.step_length == 0
    direction = jax.tree.map(lambda m: 0.3 * m, after.residual)
    wanted_updates, wanted_state = inner.update(direction, inner.init(start()), start())
    jax.tree.map(np.testing.assert_allclose, updates, wanted_updates)
    jax.tree.map(np.testing.assert_allclose, after.inner_state, wanted_state)
    support.assert_same_bits(
        (after.inverse_hessian, after.last_gradient, after.has_last, after.last_move),
        (
            opt_state.inverse_hessian,
            opt_state.last_gradient,
            opt_state.has_last,
            opt_state.last_move,
        ),
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trial_that_is_not_finite_is_rejected(bad):
    """The next, shorter one is taken if it is low enough; with none the params stay in the subspace."""
    basis, k = rows(3), 3
    tx = optperm.dim_reduce(n_components=k, alpha=0.0, max_search_steps=3, rho=0.5)
    opt_state = optperm.set_basis(tx.init(start()), basis)
    grads = jax.grad(valley)(start(), batches(1, 1)[0, 0])
    whole = sum(
        jax.tree.leaves(jax.tree.map(lambda r, g: np.tensordot(r, g, np.ndim(g)), basis, grads))
    )

    def value_fn(params):
        moved = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)))
        return jnp.where(moved > 0.75 * np.linalg.norm(whole), bad, -1e6)

    updates, after = tx.update(grads, opt_state, start(), value=0.0, value_fn=value_fn)
    assert after.step_length == 0.5
    assert after.has_last
    moved = np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(updates)))
    np.testing.assert_allclose(moved, 0.5 * np.linalg.norm(whole), rtol=1e-5)
    updates, after = tx.update(
        grads, opt_state, start(), value=0.0, value_fn=lambda params: jnp.float32(bad)
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(updates))
    assert not after.has_last


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_skips_the_step(bad):
    """Everything but the count stays, and the next step is the one that would have been taken."""
    tx = optperm.dim_reduce(optax.adam(0.1), n_components=4, max_search_steps=10)
    step, data = one_step(tx), batches(4, 1)[:, 0]
    params, opt_state = start(), optperm.set_basis(tx.init(start()), rows(4))
    for batch in data[:2]:
        params, opt_state = step(params, opt_state, batch)
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
    ours_state = optperm.set_basis(ours.init(start()), rows(6))
    target = np.ones((2, 6), np.float32)
    spoiled = np.where(np.arange(6) == 2, np.float32(np.nan), target)
    ended = {}
    for name, tx, opt_state_at_start in (
        ("optax", searching, searching.init(start())),
        ("optperm", ours, ours_state),
    ):
        params, opt_state, step = start(), opt_state_at_start, one_step(tx)
        for index in range(60):
            params, opt_state = step(params, opt_state, spoiled if index == 1 else target)
        ended[name] = float(valley(params, target))
    assert ended["optperm"] < 1e-6
    assert not ended["optax"] < 1.0


def test_before_a_basis_is_set_only_the_residual_moves():
    """It is gradient descent with momentum, and evaluates nothing."""
    tx = optperm.dim_reduce(n_components=2, gamma=0.5, alpha=0.1)
    opt_state = tx.init(start())
    params, m = start(), jax.tree.map(np.zeros_like, start())
    for batch in batches(3, 1)[:, 0]:
        grads = jax.grad(valley)(params, batch)
        m = jax.tree.map(lambda m, g: 0.5 * m + g, m, grads)
        updates, opt_state = tx.update(
            grads, opt_state, params, value=1.0, value_fn=lambda p: jnp.float32(-1e9)
        )
        jax.tree.map(lambda u, m: np.testing.assert_allclose(u, -0.1 * m, rtol=1e-5), updates, m)
        params = optax.apply_updates(params, updates)
    assert opt_state.step_length == 0


def test_without_the_residual_params_stay_in_the_subspace():
    """Alpha of 0 is pure P-BFGS: it reaches the optimum of the subspace, and nothing outside it."""
    target = np.ones((2, 6), np.float32)
    tx = optperm.dim_reduce(n_components=3, alpha=0.0, max_search_steps=20)
    basis = rows(3)
    params, opt_state = start(), optperm.set_basis(tx.init(start()), basis)
    step = one_step(tx)
    for _ in range(40):
        params, opt_state = step(params, opt_state, target)
    p = np.concatenate([basis["a"].reshape(3, 5), basis["b"][:, None]], axis=1).astype(np.float64)
    best = np.linalg.solve(p @ (SCALES[:, None] * p.T), p @ SCALES) @ p
    x = np.append(params["a"].ravel(), params["b"])
    np.testing.assert_allclose(x, best, atol=1e-3)


def test_relative_curvature_does_not_depend_on_the_scale_of_the_loss():
    """With losses of 1e-10 the absolute test keeps B as it was; the relative one learns."""

    def tiny(params, batch):
        return 1e-10 * valley(params, batch)

    learned = {}
    with jax.enable_x64(True):
        begin_at = jax.tree.map(np.float64, start())
        for curvature in ("absolute", "relative"):
            tx = optperm.dim_reduce(n_components=6, alpha=0.0, curvature=curvature)
            params, opt_state = begin_at, optperm.set_basis(tx.init(begin_at), rows(6))
            step = one_step(tx, tiny)
            for _ in range(3):
                params, opt_state = step(params, opt_state, np.ones((2, 6)))
            learned[curvature] = not np.array_equal(opt_state.inverse_hessian, np.eye(6))
    assert learned == {"absolute": False, "relative": True}


def test_schedules_and_injected_hyperparameters():
    """Numbers may be schedules of the step, or be changed between steps."""
    make = optax.inject_hyperparams(optperm.dim_reduce, static_args=("n_components",))
    injected = make(n_components=2, alpha=0.1)
    scheduled = optperm.dim_reduce(n_components=2, alpha=lambda count: 0.1 / (1 + count))
    states = {"injected": injected.init(start()), "scheduled": scheduled.init(start())}
    steps = {"injected": one_step(injected), "scheduled": one_step(scheduled)}
    params = dict.fromkeys(states, start())
    for count, batch in enumerate(batches(3, 1)[:, 0]):
        states["injected"].hyperparams["alpha"] = jnp.float32(0.1 / (1 + count))
        for name, step in steps.items():
            params[name], states[name] = step(params[name], states[name], batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *params.values())


def test_set_basis_in_any_nesting_forgets_the_old_curvature():
    """It finds the state in a chain inside a partition, and starts B anew."""
    tx = optax.chain(optax.clip(1e6), optperm.dim_reduce(n_components=3, max_search_steps=20))
    opt_state = optperm.set_basis(tx.init(start()), rows(3))
    params, step = start(), one_step(tx)
    for batch in batches(4, 1)[:, 0]:
        params, opt_state = step(params, opt_state, batch)
    assert not np.array_equal(opt_state[1].inverse_hessian, np.eye(3))
    again = optperm.set_basis(opt_state, jax.tree.map(lambda r: r.astype(jnp.bfloat16), rows(3, 1)))
    assert np.array_equal(again[1].inverse_hessian, np.eye(3))
    assert not again[1].has_last
    support.assert_same_bits(again[1].residual, opt_state[1].residual)
    for leaf, wanted in zip(
        jax.tree.leaves(again[1].subspace.rows), jax.tree.leaves(rows(3, 1)), strict=True
    ):
        assert leaf.dtype == jnp.float32
        np.testing.assert_allclose(leaf, wanted, atol=5e-3)


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
    params, opt_state = start(), recorder.init(start())
    step = one_step(recorder)
    for _ in range(16):
        params, opt_state = step(params, opt_state, np.ones((2, 6), np.float32))
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
        held = opt_state.subspace.rows
        x = np.concatenate([np.reshape(leaf, (3, -1)) for leaf in jax.tree.leaves(held)], axis=1)
        y = np.concatenate([np.reshape(leaf, (3, -1)) for leaf in jax.tree.leaves(basis)], axis=1)
        if basis_again is loaded["basis"]:
            np.testing.assert_allclose(x, y, atol=tolerance)
        one_step(tx)(start(), opt_state, np.ones((2, 6), np.float32))


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
