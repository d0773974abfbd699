"""The params that `fit` returns, evaluates and keeps where replicas train apart between commits."""

import contextlib
import functools
import itertools
import warnings

import chex
import fitting
import flax.linen as nn
import jax
import jax.numpy as jnp
import loops
import numpy as np
import optax
import pytest
import replicas
import support
from fitting import DATA, EVALUATION, linear_fit, linear_loss, linear_params
from flax import nnx

import optperm
from optperm import training
from optperm.core.states import find_state

SGD, NESTEROV = optax.sgd(0.1), optax.sgd(0.8, momentum=0.5, nesterov=True)


def diloco(*outer, **options):
    return optperm.diloco(SGD, *outer, axis_name="replica", **options)


def agn(**options):
    return optperm.agn(SGD, axis_name="replica", **options)


def run(tx, devices=2, **options):
    return linear_fit(tx=tx, **fitting.on(devices, mapped=True), **options)


def by_hand(tx, steps):
    """The center after some steps of replicas mapped by `jax.vmap`, and a commit without a step."""
    batches = [*itertools.islice(fitting.all_batches(2, replicas=(2,)), steps)]
    options = {"evaluate": loops.evaluation(linear_loss), "how": "vmap", "size": 2}
    carry = loops.train(tx, linear_params(), batches, **options)[-1]
    committing = tx._replace(update=functools.partial(tx.update, commit="only"))
    finish = loops.make_step(committing, options["evaluate"])
    return replicas.MAPPINGS["vmap"](finish, 2)(*carry, batches[-1])[0]["w"][0]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run ended after:UserWarning")
@pytest.mark.parametrize(
    "tx",
    [
        pytest.param(diloco(every=500), id="no commit"),
        pytest.param(agn(every=3), id="two commits"),
        pytest.param(
            diloco(optax.sgd(1.0), every=optperm.distributed.Every(6, 2, 3)),
            id="fragments and a delay",
        ),
        pytest.param(
            optperm.switch_after(3, diloco(every=2, center_dtype="float32"), agn(every=5)),
            id="a second phase",
        ),
    ],
)
def test_fit_between_commits_returns_the_params_of_a_commit(tx):
    """No step is lost, on whichever step the run ends."""
    result = run(tx, steps=7, opt_state=None)
    w = np.asarray(result.state.params["w"])
    np.testing.assert_allclose(w, by_hand(tx, 7), rtol=0, atol=1e-6)
    center = optperm.distributed.center_params(result.state.opt_state, final=True)["w"]
    np.testing.assert_array_equal(w, center)
    assert result.history.steps["loss"][-1] < result.history.steps["loss"][0]


@pytest.mark.slow
def test_evaluations_between_commits_are_of_the_params_that_fit_would_return():
    """At each row, in events and in the best state; training does not change by them."""
    tx, seen = diloco(optax.sgd(1.0), every=5), {}
    options = {"eval_every": 3, "keep_best": ("eval_loss", "max"), **EVALUATION}

    def note(event):
        seen[event.step] = np.asarray(event.state.params["w"])

    result = run(tx, steps=8, every={1: note}, **options)
    rows = dict(zip(*(result.history.epochs[name] for name in ("step", "eval_loss")), strict=True))
    assert [*rows] == [3, 5, 6, 8]
    for step, value in rows.items():
        np.testing.assert_allclose(seen[step], by_hand(tx, step), rtol=0, atol=1e-6)
        np.testing.assert_allclose(linear_loss({"w": seen[step]}, DATA), value, rtol=1e-6)
    np.testing.assert_array_equal(seen[8], result.state.params["w"])
    np.testing.assert_array_equal(seen[result.best_step], result.best_state.params["w"])
    assert result.best_step == 3
    support.assert_same_bits(result.history.steps, run(tx, steps=8).history.steps)


PERIODS = {
    "9": lambda axis: optax.chain(SGD, optperm.agn(SGD, every=9, axis_name=axis)),
    "9 and more": lambda axis: optperm.agn(SGD, every=lambda n: 9 + n, axis_name=axis),
    "8": lambda axis: optax.chain(SGD, optperm.agn(SGD, every=8, axis_name=axis)),
}


@pytest.mark.parametrize(
    ("period", "devices"),
    support.every_night(itertools.product(PERIODS, (None, 2)), [("9 and more", None), ("8", 2)]),
)
def test_run_that_ends_before_the_first_commit_is_warned_of_at_its_end(period, devices):
    """Warnings are errors here."""
    says = r"ended after 8 steps, before the first commit"
    with pytest.raises(UserWarning, match=says) if period != "8" else contextlib.nullcontext():
        run(PERIODS[period](devices and "replica"), devices, steps=8)


@pytest.mark.slow
def test_stream_without_a_commit_is_warned_of_once(tmp_path):
    """At its end, and not again by a resumed run that was over."""

    def warnings_of(every, **options):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run(agn(every=every), train_data=fitting.batches, **options)
        return [str(each.message) for each in found if "before the first" in str(each.message)]

    assert warnings_of(8, epochs=2) == []
    known = {"steps": 6, "checkpoints": tmp_path}
    for options, steps in (({"epochs": 2}, 10), (known, 6)):
        assert warnings_of(500, **options) == [
            f"The run ended after {steps} steps, before the first commit of agn or diloco: "
            "replicas trained apart until its end. Lower every."
        ]
    assert warnings_of(500, resume=True, **known) == []


@pytest.mark.parametrize(
    "order", [pytest.param("commits later", marks=pytest.mark.slow), "commits earlier"]
)
def test_phase_that_is_running_decides_about_the_center(order):
    """The params are the mean of replicas that train apart, with a warning, never a center of no use."""
    tx = optperm.switch_after(1000, SGD, diloco(every=2))
    if order == "commits earlier":
        tx = optperm.switch_after(3, diloco(NESTEROV, every=2), SGD)
    with pytest.warns(UserWarning, match="phase .* has no commits: fit returns the mean"):
        result = run(tx, steps=8)
    grads = jax.jit(jax.vmap(jax.grad(linear_loss)))
    params = np.stack([linear_params()["w"]] * 2)
    batches = itertools.islice(fitting.all_batches(2, replicas=(2,)), 8)
    for step, batch in enumerate(batches, 1):
        params = params - np.float32(0.1) * np.asarray(grads({"w": params}, batch)["w"])
        if order == "commits earlier" and step == 2:
            # The first step of Nesterov's momentum of 0.5 is 1.5 steps of the rate 0.8.
            center = np.asarray(linear_params()["w"])
            params = np.stack([center - np.float32(1.2) * (center - params.mean(axis=0))] * 2)
    np.testing.assert_allclose(result.state.params["w"], params.mean(axis=0), rtol=0, atol=1e-6)


def test_params_of_another_optimizer_are_not_stepped_by_the_last_commit():
    """Of a partition only one part commits; the other one has the steps of the run alone."""
    params = {name: np.ones(3, np.float32) for name in ("a", "b")}
    parts = {"a": optperm.diloco(SGD, NESTEROV, every=5), "b": optax.adam(0.1)}
    tx = optax.partition(parts, {"a": "a", "b": "b"})
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch @ (params["a"] + params["b"]) - 1.0) ** 2)

    result = linear_fit(loss_fn, [x] * 7, tx, params, epochs=1)
    options = {"evaluate": loops.evaluation(loss_fn), "init": "jit"}
    by_hand = loops.train(tx, params, [x] * 7, **options)[-1][0]
    trained = result.state.params
    np.testing.assert_allclose(trained["b"], by_hand["b"], rtol=1e-5)
    assert np.abs(trained["a"] - by_hand["a"]).max() > 1e-3  # an outer step with momentum
    assert int(find_state(result.state.opt_state, optax.ScaleByAdamState, method="adam").count) == 7


def average_gradients():
    def update(updates, state, params=None):
        return jax.lax.pmean(updates, "replica"), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def split(other, of_a=None):
    """Train "a/w" with one method that commits, and "b/w" with another optimizer."""
    methods = {"a": diloco(every=2) if of_a is None else of_a, "b": other}
    return optax.partition(methods, {"a": {"w": "a"}, "b": {"w": "b"}})


ONLY_A = {"a": {"w": True}, "b": {"w": False}}
APART = {
    "adam": split(optax.adam(0.1)),
    "adam beside agn": split(optax.adam(0.1), agn(every=2)),
    "steps of the gradient": optax.masked(diloco(every=2), ONLY_A),
    "a decay and adam": split(optax.adamw(0.1)),
    "accumulated": optax.MultiSteps(split(optax.adam(0.1)), 2).gradient_transformation(),
}
TOGETHER = {
    "frozen": split(optax.set_to_zero()),
    "decayed": split(optax.chain(optax.set_to_zero(), optax.add_decayed_weights(0.1))),
    "averaged": split(optax.chain(average_gradients(), optax.adam(0.1))),
    "committed as well": split(agn(every=2)),
    "inside diloco": optperm.diloco(split(SGD, SGD), every=2, axis_name="replica"),
}


@pytest.mark.parametrize(
    "name",
    support.every_night([*APART, *TOGETHER], ["adam", "steps of the gradient", "averaged"]),
)
def test_params_that_no_commit_reaches_are_named_at_the_end_if_replicas_differ(name):
    """Each replica has trained its own, and `fit` returns their mean."""
    params = {name: {"w": np.ones(3, np.float32)} for name in ("a", "b")}
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((batch @ (params["a"]["w"] * params["b"]["w"]) - 1.0) ** 2)

    def train(tx):
        options = {"params": params, **fitting.on(2, mapped=True)}
        with fitting.runs() as runs:
            linear_fit(loss_fn, [x] * 2, tx, steps=2, **options)
        return runs[0].carry.params

    if name in APART:
        with pytest.raises(UserWarning, match="no commit reaches 'b/w': put agn or diloco around"):
            train(APART[name])
        return
    for leaf in jax.tree.leaves(train(TOGETHER[name])):
        np.testing.assert_allclose(leaf[0], leaf[1], rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The run ended after:UserWarning")
def test_multi_steps_around_diloco_loses_no_whole_steps():
    """A commit comes through once `MultiSteps` passes it on."""
    outer = optperm.diloco(SGD, optax.sgd(1.0), every=100)
    result, same = (
        run(optax.MultiSteps(tx, 2).gradient_transformation(), devices=None, steps=8)
        for tx in (outer, SGD)
    )
    chex.assert_trees_all_close(result.state.params, same.state.params, atol=1e-6, rtol=0)
    assert int(result.state.opt_state.inner_opt_state.since_commit) == 0


@pytest.mark.parametrize(("kind", "name"), support.in_turns(["linen", "nnx"], ["diloco", "sgd"]))
def test_merged_batch_statistics_are_those_of_all_examples(kind, name):
    """The replicas have means of 0, 10, 20 and 30, whose spread is in the variance."""
    tx = {"diloco": diloco(every=1), "sgd": SGD}[name]
    sites = 10.0 * np.repeat(np.arange(4), 16)[:, None] + np.linspace(-2, 2, 64)[:, None]
    batches, options = [{"x": np.float32(sites)}], {"steps": 1, **fitting.on(4, mapped=True)}
    if kind == "linen":
        model = nn.BatchNorm(use_running_average=False, momentum=0.0)
        variables = jax.jit(model.init)(jax.random.key(0), batches[0]["x"])

        def linen_loss(params, batch, *, model_state):
            given = {"params": params, **model_state}
            out, model_state = model.apply(given, batch["x"], mutable=["batch_stats"])
            return jnp.mean(out**2), model_state

        state = training.TrainState.create(
            apply_fn=None,
            params=variables["params"],
            tx=tx,
            model_state={"batch_stats": variables["batch_stats"]},
        )
        trained = training.fit(state, linen_loss, batches, **options).state
        found = (
            trained.model_state["batch_stats"]["mean"],
            trained.model_state["batch_stats"]["var"],
        )
    else:
        norm = nnx.BatchNorm(1, momentum=0.0, rngs=nnx.Rngs(0))
        options |= {"optimizer": training.Optimizer(norm, tx, wrt=nnx.Param)}
        training.fit(
            norm, lambda model, batch: jnp.mean(model(batch["x"]) ** 2), batches, **options
        )
        found = norm.mean.get_value(), norm.var.get_value()
    np.testing.assert_allclose(np.ravel(found), [sites.mean(), sites.var()], rtol=1e-5)
