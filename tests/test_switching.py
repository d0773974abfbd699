"""`switch_after`: the two optimizers run by hand, one after the other."""

import functools
import inspect
import itertools

import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.exact import placing_states, replace_targets

STEPS, SWITCH = 7, 3


def params():
    return support.random_params()


@functools.cache
def grads(step):
    """Quarters: with the rates below, sums and products of them are exact however they are fused."""
    return jax.tree.map(lambda g: jnp.round(4 * g) / 4, support.random_like(params(), step))


def start():
    """Params on the same grid."""
    return jax.tree.map(lambda p: jnp.round(64 * p) / 64, params())


def sgd(rate=0.25):
    return optax.sgd(rate, momentum=0.5)


OPTIMIZERS = {
    "sgd": sgd(0.5),
    "sgperm": optperm.sgperm(0.4, learning_rate=0.25, momentum=0.5),
    "agn": optperm.agn(sgd(0.5), every=2),
}


def by_hand(first, then, *, track, switch=SWITCH):
    """The params after each step, and the state of the second optimizer at the end."""
    p, trail = start(), []
    first_state, then_state = first.init(p), then.init(p)
    step_first, step_then = loops.compiled(first), loops.compiled(then)
    for index in range(STEPS):
        if index < switch:
            if track:
                _, then_state = step_then(p, then_state, grads(index))
            p, first_state = step_first(p, first_state, grads(index))
        else:
            if index == switch:
                fresh = then.init(p)
                then_state = replace_targets(then_state, fresh) if track else fresh
            p, then_state = step_then(p, then_state, grads(index))
        trail.append(p)
    return trail, then_state


def trained(tx, params=None, opt_state=None, steps=range(STEPS), how="jit"):
    """Params and state after each step."""
    params = start() if params is None else params
    return loops.train(tx, params, [grads(i) for i in steps], how=how, opt_state=opt_state)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize(
    ("both", "track"),
    support.every_night(
        itertools.product([("sgd", "sgperm"), ("sgperm", "sgd"), ("agn", "agn")], [True, False]),
        [(("sgd", "sgperm"), True), (("sgperm", "sgd"), False)],
    ),
)
def test_is_the_two_by_hand(both, track):
    """Each step's params are theirs bit for bit, through the switch in one scan."""
    first, then = (OPTIMIZERS[name] for name in both)
    tx = optperm.switch_after(SWITCH, first, then, track=track)
    wanted, then_state = by_hand(first, then, track=track)
    trail = trained(tx, how="scan")
    for index, ((p, opt_state), expected) in enumerate(zip(trail, wanted, strict=True)):
        support.assert_same_bits(p, expected)
        assert opt_state.count == index + 1
        assert opt_state.switched == (index >= SWITCH)
    support.assert_same_bits(trail[-1][1].then, then_state)
    # It parts from the first optimizer alone, and the warm second one from the cold one.
    assert not np.array_equal(wanted[-1]["kernel"], trained(first)[-1][0]["kernel"])
    other, _ = by_hand(first, then, track=not track)
    assert not np.array_equal(wanted[-1]["kernel"], other[-1]["kernel"])


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("track", support.every_night([False, True], [False]))
def test_the_number_of_steps_may_be_traced_zero_or_never_reached(track):
    """Under `inject_hyperparams`; 0 leaves only the second, a number too large only the first."""
    first, then = sgd(), OPTIMIZERS["sgperm"]
    make = optax.inject_hyperparams(optperm.switch_after, static_args=("track",))
    tx = make(SWITCH, first, then, track=track)
    trail = trained(tx)
    support.assert_same_bits([p for p, _ in trail], by_hand(first, then, track=track)[0])
    for number, alone in [(0, then), (STEPS, first), (2**31 - 1, first)]:
        opt_state = tx.init(start())
        opt_state.hyperparams["num_steps"] = jnp.int32(number)
        support.assert_same_bits(trained(tx, opt_state=opt_state)[-1][0], trained(alone)[-1][0])
    # Lowered below the steps already taken, it switches at once; raised again, it does not go back.
    p, opt_state = trail[1]
    for index, number in ((2, 1), (3, 9)):
        opt_state.hyperparams["num_steps"] = jnp.int32(number)
        p, opt_state = loops.compiled(tx)(p, opt_state, grads(index))
        assert opt_state.inner_state.switched


@pytest.mark.parametrize("track", [False, True])
def test_only_the_optimizer_whose_turn_it_is_is_computed(track):
    """But a tracked one, which is computed in both phases."""
    calls = []

    def counting(name):
        def update(updates, state, params=None):
            del params
            jax.debug.callback(lambda: calls.append(name))
            return updates, state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    tx = optperm.switch_after(2, counting("first"), counting("then"), track=track)
    opt_state, update = tx.init(start()), jax.jit(tx.update)
    for index in range(4):
        _, opt_state = update(grads(index), opt_state, start())
    jax.effects_barrier()
    assert calls.count("first") == 2
    assert calls.count("then") == (4 if track else 2)


def test_weights_are_placed_in_their_phase_alone():
    """Those of the phase land exactly, and are found."""
    permute = optperm.sgperm(0.4)
    tx = optperm.switch_after(SWITCH, sgd(), permute)
    trail = trained(tx)
    at_switch = trail[SWITCH - 1][0]
    for p, opt_state in trail[SWITCH:]:
        support.assert_permutes(p, at_switch)
        support.assert_same_bits(optperm.permutation.permuted_params(opt_state), p)
    p, opt_state = trail[-1]
    assert not np.array_equal(p["kernel"], at_switch["kernel"])
    permutation = optperm.permutation.export_permutation(at_switch, opt_state)
    support.assert_same_bits(optperm.permutation.apply_permutation(at_switch, permutation), p)
    assert [type(state) for state in placing_states(opt_state)] == [type(opt_state)]
    assert not placing_states(optperm.switch_after(1, sgd(), sgd()).init(params()))


def test_targets_of_another_state_of_its_phase():
    """Both phases' targets are taken over, as by the optimizers alone."""
    one, other = params(), jax.tree.map(lambda p: p[::-1], params())
    tx = optperm.switch_after(1, optperm.sgperm(), optperm.sgperm(key=1))
    states = tx.init(one), tx.init(other)
    merged = replace_targets(*states)
    support.assert_same_bits((merged.first[1].weights, merged.then[1].weights), (other, other))
    support.assert_same_bits(merged.then[1].key, states[0].then[1].key)


@pytest.mark.usefixtures("lenient")
def test_local_steps_around_a_switch():
    """AGN takes one whose phases move params."""
    around = optperm.agn(optperm.switch_after(2, sgd(), sgd(0.5)), every=2)
    p, opt_state = trained(around, steps=range(2))[-1]
    support.assert_same_bits(p, optperm.distributed.center_params(opt_state))


@pytest.mark.usefixtures("lenient")
def test_extra_arguments_reach_line_searches_in_both_phases():
    """Two runs of L-BFGS, each with the line search that asks for value, grad and value_fn."""

    def loss_fn(p, batch):
        return batch * sum(jnp.sum((leaf - 1.0) ** 2) for leaf in jax.tree.leaves(p))

    evaluate, batch = loops.evaluation(loss_fn), jnp.float32(3.0)
    lbfgs = optax.lbfgs(memory_size=2)
    tx = optperm.switch_after(1, lbfgs, lbfgs)
    (before, _), (after, _) = loops.train(tx, start(), [batch] * 2, evaluate=evaluate)
    # The second one has no memory of the first one's step.
    alone = start()
    for _ in range(2):
        alone, _ = loops.compiled(lbfgs, evaluate)(alone, lbfgs.init(alone), batch)
    support.assert_close(after, alone, rtol=1e-5)
    assert loss_fn(after, batch) < loss_fn(before, batch) < loss_fn(start(), batch)


@pytest.mark.usefixtures("lenient")
def test_in_multi_steps_it_counts_whole_steps():
    """Two micro-steps are one: the switch comes after 2 * SWITCH of them, placed exactly."""
    tx = optax.MultiSteps(optperm.switch_after(2, sgd(), optperm.sgperm(0.4)), every_k_schedule=2)
    trail = [p for p, _ in loops.train(tx, start(), [grads(index // 2) for index in range(8)])]
    wanted, _ = by_hand(sgd(), optperm.sgperm(0.4), track=False, switch=2)
    support.assert_same_bits(trail[1::2], wanted[:4])
    support.assert_same_bits(trail[6], trail[5])


def functions_of_states():
    """The public functions with an argument `opt_state`, by name."""
    return {
        name
        for name, each in support.PUBLIC.items()
        if inspect.isfunction(each) and "opt_state" in inspect.signature(each).parameters
    }


def collected():
    """SWAG with one model in its state."""
    tx = optperm.swag(1)

    def init(p):
        return tx.init(p)._replace(num_models=jnp.int32(1))

    return optax.GradientTransformation(init, tx.update)


HELD = optax.chain(sgd(), optperm.mask_elements())
FLAT = jnp.linspace(-1.0, 1.0, 12)
SAMPLES = optperm.bayes.Samples(FLAT.reshape(2, 6), FLAT[:2], (), jnp.int32(6), jnp.int32(1))
# For each function a method of which it reads the state, and a call.
READ = {
    "adapted_kernel": (optperm.constant_sgd(9, 3), lambda s, p: optperm.bayes.adapted_kernel(s)),
    "center_params": (
        optperm.diloco(sgd(), every=9),
        lambda s, p: optperm.distributed.center_params(s),
    ),
    "export_permutation": (
        optperm.sgperm(),
        lambda s, p: optperm.permutation.export_permutation(p, s),
    ),
    "freeze": (HELD, lambda s, p: optperm.sparsity.freeze(s, 0.5, scores=p)),
    "permuted_params": (optperm.laperm(sgd(), 2), optperm.permutation.permuted_params),
    "posterior_report": (
        optperm.constant_sgd(9, 3),
        lambda s, p: optperm.bayes.posterior_report(SAMPLES, s),
    ),
    "prune": (HELD, lambda s, p: optperm.sparsity.prune(p, s, 0.5)),
    "reset_masks": (HELD, lambda s, p: optperm.sparsity.reset_masks(s)),
    "sample_params": (
        optperm.ivon(0.1, 9),
        lambda s, p: optperm.bayes.sample_params(s, p, jax.random.key(0)),
    ),
    "set_basis": (
        optperm.project(sgd(), n_components=1),
        lambda s, p: optperm.subspace.set_basis(s, one_row_of(p)),
    ),
    "posterior_mean": (collected(), lambda s, p: optperm.bayes.posterior_mean(s)),
    "take_snapshot": (optperm.svrg(every=3), lambda s, p: optperm.variance.take_snapshot(s, p, p)),
    "trajectory": (optperm.record_trajectory(1, 2), lambda s, p: optperm.subspace.trajectory(s)),
}
# Both go by phases: `apply_updates` by the exact entries, and a step by its own state.
# `quantize` and `dequantize` convert the states of all phases.
OTHERS = {"apply_updates", "dequantize", "draw_samples", "quantize"}


def one_row_of(p):
    """One direction, of the length of a basis vector."""
    return jax.tree.map(lambda leaf: leaf[None], optax.tree.scale(1 / optax.tree.norm(p), p))


def test_every_function_of_a_state_is_tested_in_phases():
    """A new public function with an argument `opt_state` has to be in this table."""
    assert functions_of_states() == READ.keys() | OTHERS


@pytest.mark.usefixtures("lenient")
@pytest.mark.filterwarnings("ignore:The (first|maximum|minimum) ")
@pytest.mark.parametrize("name", READ)
def test_a_state_in_a_phase_that_does_not_run_is_refused(name):
    """And of two states that of the phase that runs is found."""
    tx, call = READ[name]
    p = start()
    over = optperm.switch_after(2, tx, sgd()).init(p)._replace(switched=jnp.array(True))
    yet_to_come = optperm.switch_after(2, sgd(), tx).init(p)
    for opt_state in (over, yet_to_come, (optax.EmptyState(), yet_to_come)):
        with pytest.raises(ValueError, match=r"in a phase \(of .*\) that is not running"):
            call(opt_state, p)
    both = optperm.switch_after(2, tx, tx).init(p)
    call(both, p)
    if name != "posterior_report":
        with pytest.raises(ValueError, match=r"not known which phase"):
            jax.jit(lambda s: jax.tree.leaves(call(s, p)))(both)


@pytest.mark.usefixtures("lenient")
def test_a_commit_without_a_step_is_of_the_phase_that_took_the_last_step():
    """At the very step of a switch, and as no step of the phases; SGD has nothing to commit."""
    tx = optperm.switch_after(3, optperm.agn(sgd(0.1), every=9), optperm.agn(sgd(0.1), every=9))
    p, opt_state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    for _ in range(3):
        u, opt_state = tx.update(jnp.float32(1.0), opt_state, p)
        p = optperm.apply_updates(p, u, opt_state)
    steps = 0
    for _ in range(2):  # the second one changes nothing
        u, opt_state = tx.update(jnp.float32(jnp.nan), opt_state, p, commit="only")
        p, steps = optperm.apply_updates(p, u, opt_state), int(opt_state.count)
        support.assert_same_bits(p, optperm.distributed.center_params(opt_state, final=True))
    assert steps == 3
    np.testing.assert_allclose(p, 0.9, rtol=1e-6)  # AGN's step of the mean gradient
    tx = optperm.switch_after(9, sgd(0.1), optperm.diloco(sgd(0.1), every=9))
    before = tx.init(p)
    u, after = tx.update(jnp.float32(jnp.nan), before, p, commit="only")
    assert u == 0
    support.assert_same_bits(after, before)


@pytest.mark.usefixtures("lenient")
@pytest.mark.parametrize("plan", [4, optperm.distributed.Every(4, delay=2)])
def test_a_tracked_center_begins_at_the_switch(plan):
    """Nothing that it got in the first phase, sent or in flight, reaches the new center."""
    then = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=plan)
    tx = optperm.switch_after(5, optax.sgd(0.5), then, track=True)
    p, opt_state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    for t in range(10):
        u, opt_state = tx.update(jnp.float32(1.0), opt_state, p)
        after = optperm.apply_updates(p, u, opt_state)
        # A step, or a pull to a center of at most two steps ago.
        np.testing.assert_array_less(np.abs(after - p), 0.51 if t < 5 else 0.31)
        p = after


@pytest.mark.usefixtures("lenient")
def test_a_tracked_center_has_no_gradients_of_the_first_phase():
    """The first commit after the switch is one step by the mean of its own period's gradients."""
    then = optperm.agn(optax.sgd(0.1), every=4)
    tx = optperm.switch_after(5, optax.sgd(0.5), then, track=True)
    p, opt_state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    for _ in range(9):
        u, opt_state = tx.update(jnp.float32(1.0), opt_state, p)
        p = optperm.apply_updates(p, u, opt_state)
    np.testing.assert_allclose(p, 1 - 5 * 0.5 - 0.1, rtol=1e-6)
