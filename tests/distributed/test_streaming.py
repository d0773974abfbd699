"""Plans of fragments that may arrive later, centers of more digits, and options that go together."""

import functools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support

import optperm
from optperm.distributed import Compression, Every, center_params

SGD = optax.sgd(1.0)


def test_fragments_are_sent_at_even_distances():
    """Fragment p of 4 at the steps that are floor(10 p / 4) modulo 10, and received a step later."""
    plan = Every(10, fragments=4, delay=1)
    sent = {step: plan.at(step).send for step in range(1, 21) if plan.at(step).send}
    assert sent == {2: (1,), 5: (2,), 7: (3,), 10: (0,), 12: (1,), 15: (2,), 17: (3,), 20: (0,)}
    assert all(plan.at(step + 1).receive == fragments for step, fragments in sent.items())


def test_a_plan_sends_a_fragment_as_maxtext_does():
    """Each n-th of a period that is rounded to a multiple of n, and another fragment each time."""
    for n, sync_period in ((2, 7), (3, 10), (5, 16)):
        gap = round(sync_period / n)
        plan = Every(n * gap, n, delay=1)
        for step in range(1, 60):
            sent = (step % (gap * n) // gap,) if step % gap == 0 else ()
            assert plan.at(step).send == plan.at(step + 1).receive == sent


def test_exchanges_and_states_of_another_plan_are_refused():
    params = {"a": jnp.ones((3, 2)), "b": jnp.ones(2)}
    tx = optperm.diloco(SGD, every=Every(4, 2))
    state, message = tx.init(params), "belongs to a plan with fragments=2 and no delay, not to"
    for other in (Every(4, 3), Every(4, 2, 1), 4):
        with pytest.raises(ValueError, match=message):
            optperm.diloco(SGD, every=other).update(params, state, params)
    for wrong in (Every(4, 3).at(4), Every(4, 2, 1).at(4), 3):
        with pytest.raises((ValueError, TypeError), match="plan"):
            tx.update(params, state, params, commit=wrong)
    for options in ({"fragments": 4}, {"delay": 3}):
        with pytest.raises(ValueError, match="at most period, and delay must be below period"):
            Every(3, **options)


def test_a_state_made_with_another_argument_is_refused():
    """If its arrays show it, also in a trace; a period or a decay is no such argument."""
    params = {"layers": (4, 3), "a": (2,), "b": (2,)}
    params = {name: np.ones(shape, np.float32) for name, shape in params.items()}
    diloco = functools.partial(optperm.diloco, SGD, SGD, every=Every(4, 2))
    agn = functools.partial(optperm.agn, SGD, every=Every(4, 2))
    parts = functools.partial(dict, a=0, b=1)
    sgd = optax.chain(SGD)
    for made, used, name, is_static in (
        (
            diloco(fragment_of=parts(layers=0)),
            diloco(fragment_of=parts(layers=1)),
            "fragment_of",
            0,
        ),
        (
            diloco(fragment_of=parts(layers=[0, 0, 1, 1])),
            diloco(fragment_of=lambda path, _: [0, 1, 0, 1] if "l" in str(path) else 0),
            "fragment_of",
            0,
        ),
        (diloco(), diloco(fragment_of=parts(layers=1)), "fragment_of", 0),
        (diloco(), diloco(compress=Compression(bits=4)), "compress", 1),
        (diloco(compress=Compression(bits=4)), diloco(), "compress", 1),
        (diloco(compress=Compression(0.5)), diloco(compress=Compression(0.25)), "compress", 0),
        (diloco(), diloco(center_dtype="bfloat16"), "center_dtype", 1),
        (diloco(), diloco(combine="pairs", axis_name=replicas.AXIS), "combine", 0),
        (agn(compress=Compression(0.5)), agn(compress=Compression(0.25)), "compress", 0),
        (agn(), agn(fragment_of=parts(layers=1)), "fragment_of", 0),
        (agn(), agn(center_dtype="bfloat16"), "center_dtype", 1),
        (diloco(), diloco(combine="sum"), "", 1),
        (diloco(), optperm.diloco(SGD, SGD, every=Every(6, 2), mixing=0.5), "", 1),
        (
            diloco(compress=Compression(0.5)),
            diloco(compress=Compression(0.5, decay=0.1)),
            "",
            1,
        ),
        (optperm.agn(sgd, every=3), optperm.agn(sgd, every=4, combine="sum"), "", 1),
    ):
        state = jax.jit(made.init)(params)

        def give(state, used=used):
            take = lambda _: used.update(params, state, params, commit=False)  # noqa: E731
            return jax.vmap(take, axis_name=replicas.AXIS)(np.zeros(1, np.float32))

        # A state that is no argument of the trace is seen, as outside of it.
        seen, traced = functools.partial(give, state), functools.partial(give)
        for call, given in ((seen, ()), (traced, (state,)))[: 1 + is_static]:
            if not name:
                jax.eval_shape(call, *given)
                continue
            with pytest.raises(ValueError, match=f"made with another {name}="):
                jax.eval_shape(call, *given)


def test_slices_land_exactly_and_on_stacked_states():
    """After an exchange the slices of its fragment are the center's bits, within vmap and outside."""
    params = {"layers": np.linspace(0.1, 0.7, 12, dtype=np.float32).reshape(4, 3)}
    options = {"axis_name": replicas.AXIS, "fragment_of": {"layers": (0, 1, 1, 0)}}
    tx = optperm.diloco(optax.sgd(0.3), every=Every(4, 2), **options)

    def update(p, s, target):
        updates, s = tx.update(jax.tree.map(lambda p: p - target, p), s, p)
        return updates, s, optperm.apply_updates(p, updates, s)

    step = replicas.MAPPINGS["vmap"](update, 2)
    p, s = (replicas.stack([tree] * 2) for tree in (params, jax.jit(tx.init)(params)))
    apply = jax.jit(optperm.apply_updates)
    for number, rows in ((1, []), (2, [1, 2]), (3, []), (4, [0, 3])):
        updates, s, within = step(p, s, np.float32([1.0, 2.0]))
        p = jax.device_get(apply(p, updates, s))
        support.assert_same_bits(p, within)
        is_same = (p["layers"] == np.asarray(center_params(s)["layers"])).all(axis=(0, 2))
        assert np.flatnonzero(is_same).tolist() == rows, number


@functools.partial(jax.jit, static_argnums=(0, 3))
def push(tx, params, opt_state, commit):
    """Take a step of plain SGD, by -1."""
    updates, opt_state = tx.update(jnp.ones(1), opt_state, params, commit=commit)
    return optperm.apply_updates(params, updates, opt_state), opt_state


def test_an_exchange_is_received_once_and_only_if_it_was_sent():
    """Push one replica down by 1 a step; it is averaged with itself, by a plan with a delay."""
    plan = Every(4, 1, 2)
    tx = optperm.diloco(SGD, SGD, every=plan)

    def run(flags):
        params, opt_state = jnp.zeros(1), tx.init(jnp.zeros(1))
        for commit in flags:
            params, opt_state = push(tx, params, opt_state, commit)
            yield float(params[0])

    # Told to exchange all between sending and arrival, it goes no further than its own steps.
    for number in (5, 6):
        flags = [True if step == number else plan.at(step) for step in range(1, 10)]
        assert all(params >= -step for step, params in enumerate(run(flags), start=1))
    # A fresh state that is given the exchanges of later steps keeps its own params.
    assert list(run(map(plan.at, (5, 6, 7, 8)))) == [-1, -2, -3, -4]


def test_a_center_that_is_replaced_receives_nothing_that_was_sent_before():
    """What is in flight belongs to the center of before, so its arrival changes nothing."""
    plan = Every(4, 1, 2)
    tx, params = optperm.diloco(SGD, SGD, every=plan), np.zeros(1, np.float32)
    opt_state = jax.jit(tx.init)(params)

    for step in range(1, 7):
        params, opt_state = push(tx, params, opt_state, plan.at(step))
        if step == 4:
            center = np.full(1, 9.0, np.float32)
            opt_state = opt_state.replace_targets(opt_state._replace(center=center))
    assert (float(params[0]), float(center_params(opt_state)[0])) == (-6.0, 9.0)


def test_a_center_in_float32_under_bfloat16_params():
    """Outer steps too small for bfloat16 add up in it, and the rounding of the params adds nothing."""
    tx = optperm.diloco(SGD, optax.sgd(2**-6), every=1, center_dtype=jnp.float32)
    grads = [jnp.full(3, size, jnp.bfloat16) for size in [2**-4] * 7 + [0.0, 0.0]]
    center = np.full(3, 1 - 7 * 2**-10, np.float32)
    for params, opt_state in loops.train(tx, jnp.ones(3, jnp.bfloat16), grads)[6:]:
        support.assert_same_bits(center_params(opt_state), center)
        support.assert_same_bits(params, center.astype(jnp.bfloat16))


def test_a_center_of_agn_in_float32_under_bfloat16_params():
    """Steps too small for bfloat16 add up in the center, and its optimizer has moments in float32."""
    tx = optperm.agn(SGD, optax.sgd(2**-10, momentum=0.0), every=1, center_dtype="float32")
    grads = [jnp.ones(3, jnp.bfloat16)] * 7
    params, opt_state = loops.train(tx, jnp.ones(3, jnp.bfloat16), grads)[-1]
    center = np.full(3, 1 - 7 * 2**-10, np.float32)
    support.assert_same_bits(center_params(opt_state), center)
    support.assert_same_bits(params, center.astype(jnp.bfloat16))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(opt_state.center_state)} == {"float32"}


def test_gradients_of_fewer_digits_do_not_round_the_displacement():
    tx = optperm.diloco(SGD, SGD, every=2)
    grads = [jnp.full(1, grad, "bfloat16") for grad in (1.0, 2.0**-12)]
    with jax.numpy_dtype_promotion("standard"):
        params, opt_state = loops.train(tx, jnp.zeros(1), grads)[-1]
    assert float(params[0]) == -1 - 2.0**-12
    assert int(opt_state.skipped) == 0


@pytest.mark.slow
def test_everything_at_once_with_donated_buffers_and_an_empty_leaf():
    options = {"compress": Compression(0.5, bits=4), "center_dtype": "float32"}
    tx = optperm.diloco(optax.sgd(0.1), every=Every(4, 2, 1), **options)
    params = {"a": jnp.zeros((0, 3)), "b": jnp.arange(3.0)}
    opt_state = jax.jit(tx.init)(params)
    step = jax.jit(loops.make_step(tx), donate_argnums=(0, 1))
    for _ in range(6):
        params, opt_state = step(params, opt_state, jax.tree.map(jnp.ones_like, params))
    assert jnp.isfinite(params["b"]).all()


def test_options_of_one_fragment_go_together():
    """A schedule of periods, an outer optimizer that reads extra arguments, few bits, a wide center."""

    def update(updates, state, params=None, *, value, **extra_args):
        return jax.tree.map(lambda p: jnp.full_like(p, -value), params), state

    reads_value = optax.GradientTransformationExtraArgs(lambda params: (), update)
    options = {"compress": Compression(bits=8), "center_dtype": "float32"}
    tx = optperm.diloco(SGD, reads_value, every=lambda commits: commits + 1, **options)
    evaluate = lambda p, value: (jnp.ones_like(p), {"value": value})  # noqa: E731
    values = list(np.arange(1.0, 7.0, dtype=np.float32))
    trail = loops.train(tx, jnp.ones(3, jnp.bfloat16), values, evaluate=evaluate)
    centers = [float(center_params(opt_state)[0]) for _, opt_state in trail]
    assert centers == [0, 0, -3, -3, -3, -9]
