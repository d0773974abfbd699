"""`switch_after`: the two optimizers run by hand, one after the other."""

import calls
import chex
import jax
import jax.numpy as jnp
import kernels
import loops
import numpy as np
import optax
import pytest
import support

import optperm
from optperm.exact import placing_states, replace_targets

pytestmark = pytest.mark.usefixtures("lenient")
STEPS, SWITCH = 7, 3


def on_grid(tree, parts):
    """Round the gradients: with the rates below, sums and products are exact under any fusion."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.round(parts * leaf) / parts), tree)


START = on_grid(support.random_params(), 64)
GRADS = [on_grid(support.random_like(START, step), 4) for step in range(STEPS)]


def sgd(rate=0.25):
    return optax.sgd(rate, momentum=0.5)


OPTIMIZERS = {
    "sgd": sgd(0.5),
    "sgperm": optperm.sgperm(0.4, learning_rate=0.25, momentum=0.5),
    "agn": optperm.agn(sgd(0.5), every=2),
}
PAIRS = ("sgd", "sgperm"), ("sgperm", "sgd"), ("agn", "agn")


def by_hand(first, then, *, track):
    """Return the params after each step, and the state of the second optimizer at the end."""
    trail = loops.train(first, START, GRADS[:SWITCH], init="jit")
    at_switch = trail[-1][0]
    init = jax.jit(then.init)
    then_state = init(at_switch)
    if track:
        warm = init(START)
        before = [START, *(p for p, _ in trail[:-1])]
        for p, g in zip(before, GRADS[:SWITCH], strict=True):
            _, warm = loops.compiled(then)(p, warm, g)
        then_state = replace_targets(warm, then_state)
    trail += loops.train(then, at_switch, GRADS[SWITCH:], opt_state=then_state)
    return [p for p, _ in trail], trail[-1][1]


@pytest.mark.parametrize(
    ("first", "then", "track"),
    support.every_night(
        [(*pair, track) for pair in PAIRS for track in (True, False)],
        [(*PAIRS[0], True), (*PAIRS[1], False)],
    ),
)
def test_switch_trains_as_the_two_by_hand(first, then, track):
    """Give the params of each step bit for bit, through the switch in one scan."""
    first, then = OPTIMIZERS[first], OPTIMIZERS[then]
    tx = optperm.switch_after(SWITCH, first, then, track=track)
    wanted, then_state = by_hand(first, then, track=track)
    trail = loops.train(tx, START, GRADS, how="scan", init="jit")
    for index, ((p, opt_state), expected) in enumerate(zip(trail, wanted, strict=True)):
        support.assert_same_bits(p, expected)
        assert opt_state.count == index + 1
        assert opt_state.switched == (index >= SWITCH)
    support.assert_same_bits(trail[-1][1].then, then_state)
    # The warm second optimizer parts from the cold one.
    other, _ = by_hand(first, then, track=not track)
    assert not np.array_equal(wanted[-1]["kernel"], other[-1]["kernel"])


def test_number_of_steps_may_be_traced_zero_or_never_reached():
    """Leave only the second for 0, and only the first for a number too large."""
    first, then = sgd(), OPTIMIZERS["sgperm"]
    make = optax.inject_hyperparams(optperm.switch_after, static_args=("track",))
    tx = make(SWITCH, first, then)
    trail = loops.train(tx, START, GRADS, init="jit")
    support.assert_same_bits([p for p, _ in trail], by_hand(first, then, track=False)[0])
    for number, alone in [(0, then), (2**31 - 1, first)]:
        opt_state = jax.jit(tx.init)(START)
        opt_state.hyperparams["num_steps"] = jnp.int32(number)
        p, _ = loops.train(tx, START, GRADS, opt_state=opt_state)[-1]
        support.assert_same_bits(p, loops.train(alone, START, GRADS, init="jit")[-1][0])
    # Lowered below the steps already taken, it switches at once; raised again, it does not go back.
    p, opt_state = trail[1]
    for index, number in ((2, 1), (3, 9)):
        opt_state.hyperparams["num_steps"] = jnp.int32(number)
        p, opt_state = loops.compiled(tx)(p, opt_state, GRADS[index])
        assert opt_state.inner_state.switched


def test_inside_of_multi_steps_it_counts_steps_of_the_mean_gradient():
    """Two gradients are one step: the second optimizer takes the third step, of gradients 5 and 6."""
    tx = optax.MultiSteps(optperm.switch_after(2, optax.sgd(1.0), optax.sgd(4.0)), 2)
    trail = loops.train(
        tx.gradient_transformation(), jnp.zeros(1), list(jnp.arange(1.0, 9.0)[:, None])
    )
    assert [float(w[0]) for w, _ in trail] == [0, -1.5, -1.5, -5, -5, -27, -27, -57]


@pytest.mark.parametrize("track", [False, True])
def test_only_the_optimizer_whose_turn_it_is_is_computed(track):
    """Compute a tracked one in both phases."""
    calls = []

    def counting(name):
        def count(updates, _):
            jax.debug.callback(lambda: calls.append(name))
            return updates

        return optax.stateless(count)

    tx = optperm.switch_after(2, counting("first"), counting("then"), track=track)
    loops.train(tx, jnp.zeros(1), [jnp.zeros(1)] * 4)
    jax.effects_barrier()
    assert calls.count("first") == 2
    assert calls.count("then") == (4 if track else 2)


def test_weights_are_placed_in_their_phase_alone():
    """The active phase sets exact values, and `permuted_params` finds them."""
    tx = optperm.switch_after(SWITCH, sgd(), optperm.sgperm(0.4))
    trail = loops.train(tx, START, GRADS, how="scan", init="jit")
    at_switch = trail[SWITCH - 1][0]
    for p, opt_state in trail[SWITCH:]:
        support.assert_permutes(p, at_switch)
        support.assert_same_bits(optperm.permutation.permuted_params(opt_state), p)
    assert not np.array_equal(p["kernel"], at_switch["kernel"])

    @jax.jit
    def rebuild():  # of an active phase that is known
        permutation = optperm.permutation.export_permutation(at_switch, opt_state)
        return optperm.permutation.apply_permutation(at_switch, permutation)

    support.assert_same_bits(rebuild(), p)


def test_targets_of_another_state_replace_those_of_both_phases():
    one, other = START, jax.tree.map(lambda p: p[::-1], START)
    tx = optperm.switch_after(1, optperm.sgperm(), optperm.sgperm(key=1))
    state = tx.init(one)
    assert [type(each) for each in placing_states(state)] == [type(state)]
    merged = replace_targets(state, tx.init(other))
    support.assert_same_bits((merged.first[1].weights, merged.then[1].weights), (other, other))
    support.assert_same_bits(merged.then[1].key, state.then[1].key)
    assert not placing_states(optperm.switch_after(1, sgd(), sgd()).init(one))


@pytest.mark.slow
def test_extra_arguments_reach_line_searches_in_both_phases():
    """Run L-BFGS twice, with a line search that asks for value, grad and value_fn."""

    def loss_fn(p, batch):
        return batch * sum(jnp.sum((leaf - 1.0) ** 2) for leaf in jax.tree.leaves(p))

    evaluate, batch = loops.evaluation(loss_fn), jnp.float32(3.0)
    lbfgs = optax.lbfgs(memory_size=2)
    tx = optperm.switch_after(1, lbfgs, lbfgs)
    (before, _), (after, _) = loops.train(tx, START, [batch] * 2, evaluate=evaluate)
    # The second one has no memory of the first one's step.
    alone = START
    for _ in range(2):
        alone, _ = loops.compiled(lbfgs, evaluate)(alone, lbfgs.init(alone), batch)
    chex.assert_trees_all_close(after, alone, rtol=1e-5)
    assert loss_fn(after, batch) < loss_fn(before, batch) < loss_fn(START, batch)


# What reads the state of a method, and a state that it reads. `apply_updates` goes by the exact entries,
# and `quantize` and `dequantize` convert the states of all phases.
READ = {
    name: given["opt_state"]
    for name, given in calls.FUNCTIONS.items()
    if "opt_state" in given and name not in calls.OF_ANY_STATE
}
READ["posterior_report"] = kernels.constant_sgd().init(calls.PARAMS)


# One of each subpackage that has any.
USUAL = ("posterior_mean", "center_params", "permuted_params", "prune", "trajectory", "wide_params")


@pytest.mark.filterwarnings("ignore:The (first|maximum|minimum) ")
@pytest.mark.parametrize("name", support.every_night(READ, USUAL))
def test_a_state_in_a_phase_that_does_not_run_is_refused(name):
    """Of two states, find the one of the active phase; in a compiled program, find neither."""
    other, state = sgd().init(calls.PARAMS), READ[name]
    both = optperm.switch_after(2, sgd(), sgd()).init(calls.PARAMS)

    def read(opt_state):
        return calls.call(name, {"opt_state": opt_state})

    yet_to_come = both._replace(then=state)
    over = both._replace(first=state, switched=jnp.array(True))
    for opt_state in (over, yet_to_come, (other, yet_to_come)):
        with pytest.raises(ValueError, match=r"in a phase \(of .*\) that is not running"):
            read(opt_state)
    in_both = both._replace(first=state, then=state)
    read(in_both)
    if name != "posterior_report":
        with pytest.raises(ValueError, match=r"not known which phase"):
            jax.eval_shape(lambda s: jax.tree.leaves(read(s)), in_both)


def test_a_commit_without_a_step_is_of_the_phase_that_took_the_last_step():
    """Commit at the very step of a switch; SGD has nothing to commit."""
    agn = optperm.agn(sgd(0.1), every=9)
    tx = optperm.switch_after(3, agn, agn)
    p, opt_state = loops.train(tx, jnp.float32(1.0), [jnp.float32(1.0)] * 3)[-1]
    for _ in range(2):  # the second one changes nothing
        u, opt_state = tx.update(jnp.float32(jnp.nan), opt_state, p, commit="only")
        p = optperm.apply_updates(p, u, opt_state)
        support.assert_same_bits(p, optperm.distributed.center_params(opt_state, final=True))
    assert opt_state.count == 3
    np.testing.assert_allclose(p, 0.9, rtol=1e-6)  # AGN's step of the mean gradient
    tx = optperm.switch_after(9, sgd(0.1), optperm.diloco(sgd(0.1), every=9))
    before = tx.init(p)
    u, after = tx.update(jnp.float32(jnp.nan), before, p, commit="only")
    assert u == 0
    support.assert_same_bits(after, before)


@pytest.mark.parametrize("plan", [4, optperm.distributed.Every(4, delay=2)])
def test_a_tracked_center_begins_at_the_switch(plan):
    """Let nothing that it got in the first phase, sent or in flight, reach the new center."""
    then = optperm.diloco(optax.sgd(0.1), optax.sgd(1.0), every=plan)
    tx = optperm.switch_after(5, optax.sgd(0.5), then, track=True)
    trail = [p for p, _ in loops.train(tx, jnp.float32(1.0), [jnp.float32(1.0)] * 10)]
    steps = np.abs(np.diff([1.0, *trail]))
    # A step, or a pull to a center of at most two steps ago.
    np.testing.assert_array_less(steps, [0.51] * 5 + [0.31] * 5)


def test_a_tracked_center_has_no_gradients_of_the_first_phase():
    """Take in the first commit one step by the mean of the gradients since the switch."""
    then = optperm.agn(optax.sgd(0.1), every=4)
    tx = optperm.switch_after(5, optax.sgd(0.5), then, track=True)
    p, _ = loops.train(tx, jnp.float32(1.0), [jnp.float32(1.0)] * 9)[-1]
    np.testing.assert_allclose(p, 1 - 5 * 0.5 - 0.1, rtol=1e-6)
