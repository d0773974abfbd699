"""What samplers and control variates need of the loss and its gradient, before the first step."""

import itertools
import warnings
from unittest import mock

import fitting
import jax.numpy as jnp
import optax
import pytest
import support
from fitting import BATCH, DATA, linear_fit, linear_loss

import optperm
from optperm.evaluation import NOT_GRADIENT, NOT_MEAN
from optperm.training import _steps as steps
from optperm.training._conditions import LOST_UPDATES, NOT_COUNT

NUM_DATA = len(DATA["y"])


def summed(params, batch):
    return len(batch["y"]) * linear_loss(params, batch)


def mixed(params, batch):
    """Labels of another shape than the predictions, so that each label meets each prediction."""
    errors = (batch["x"] @ params["w"])[:, 0] - batch["y"].astype(jnp.float32)[:, None]
    return jnp.mean(errors**2)


def pair(params, batch):
    return summed(params, batch), len(batch["y"])


def wrong_pair(params, batch):
    return summed(params, batch), 1.0


SGLD = optperm.sgld(1e-4, NUM_DATA)
METHODS = {
    "sgld": SGLD,
    "sghmc": optperm.sghmc(1e-4, NUM_DATA, friction=0.1),
    "ivon": optperm.ivon(0.01, NUM_DATA, hess_init=1.0),
    "mandt_sgd": fitting.method("mandt_sgd"),
    "svrg": fitting.method("svrg"),
    "later": optperm.switch_after(3, optax.adam(0.01), optax.chain(optax.scale_by_adam(), SGLD)),
}
MEANS = {linear_loss, pair}


class Begun(Exception):
    """Training begins."""


def begin(*_):
    raise Begun


def said(tx, loss_fn=linear_loss, **options):
    """Return what is said of the loss and its gradient before the first step, which is not compiled."""
    begun = mock.patch.object(steps, "compile_steps", return_value=steps.Steps(begin, begin))
    with warnings.catch_warnings(record=True) as caught, begun:
        warnings.simplefilter("always")
        with pytest.raises(Begun):
            linear_fit(loss_fn, tx=tx, steps=2, **options)
    found = [each for each in caught if str(each.message) in (NOT_MEAN, NOT_GRADIENT, NOT_COUNT)]
    assert {each.filename for each in found} <= {fitting.__file__}
    return [str(each.message) for each in found]


@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("sgld", (mixed, pair, wrong_pair)),
        ("svrg", (summed,)),
        pytest.param("sgld", (linear_loss,), marks=pytest.mark.exhaustive),
        pytest.param("svrg", (linear_loss,), marks=pytest.mark.exhaustive),
        pytest.param("later", (pair, summed), marks=pytest.mark.exhaustive),
        *[
            pytest.param(name, (summed,), marks=pytest.mark.slow)
            for name in ("ivon", "sghmc", "mandt_sgd")
        ],
    ],
)
def test_a_loss_that_is_no_mean_is_said_for_methods_that_need_a_mean(name, losses):
    """From arrays and from streams."""
    start = {"epoch_start": optperm.variance.take_snapshot} if name == "svrg" else {}
    for loss_fn in losses:
        wrong = NOT_COUNT if loss_fn is wrong_pair else NOT_MEAN
        expected = [wrong] * (loss_fn not in MEANS)
        data = {"train_data": fitting.batches} if loss_fn is mixed else {}
        assert said(METHODS[name], loss_fn, **data, **start) == expected, loss_fn


def test_other_optimizers_train_with_any_loss():
    """Warnings are errors here."""
    linear_fit(summed, tx=optax.adam(0.01), steps=2)


BEFORE = {
    "identity": optax.identity(),
    "clipped": optax.clip_by_global_norm(10.0),
    "decayed": optax.add_decayed_weights(0.1),
    "momentum": optax.trace(0.9),
    "svrg": optperm.svrg(),
    "storm": optperm.recursive_gradient(0.1),
}


@pytest.mark.parametrize(
    ("before", "name", "is_said", "is_mapped"),
    support.every_night(
        [
            ("identity", "sgld", False, False),
            ("clipped", "sgld", True, False),
            ("clipped", "sgld", True, True),
            ("decayed", "ivon", True, False),
            ("identity", "ivon", False, True),
            ("momentum", "sgld", True, False),
            ("svrg", "sgld", False, False),
            ("storm", "sgld", False, False),
        ],
        [
            ("clipped", "sgld", True, False),
            ("momentum", "sgld", True, False),
            ("storm", "sgld", False, False),
        ],
    ),
)
def test_a_gradient_that_is_changed_before_a_sampler_is_said(before, name, is_said, is_mapped):
    """Also by a limit or a momentum that keeps the first gradient, but not by a control variate."""
    axis_name = "replica" if is_mapped else None
    ivon = optperm.ivon(0.01, NUM_DATA, hess_init=1.0, axis_name=axis_name)
    where = fitting.on(2, mapped=True) if is_mapped else {}
    start = {"epoch_start": optperm.variance.take_snapshot} if before == "svrg" else {}
    tx = optax.chain(BEFORE[before], SGLD if name == "sgld" else ivon)
    assert said(tx, **where, **start) == [NOT_GRADIENT] * is_said


@pytest.mark.slow
def test_batch_statistics_are_no_sum():
    """With BatchNorm the halves differ from the batch by design, but a sum is said."""
    options = {"steps": 2, "batch_size": BATCH}
    for name in ("mandt_sgd", "svrg"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fitting.fit("linen", name, **options)

        def loss_fn(params, batch, *, model_state, rng):
            loss, new = fitting.linen_loss(params, batch, model_state=model_state, rng=rng)
            return len(batch["y"]) * loss, new

        with pytest.warns(UserWarning, match="not the mean of the losses of its halves"):
            fitting.fit("linen", name, loss_fn=loss_fn, **options)


def with_metric(params, batch):
    errors = jnp.abs(batch["x"] @ params["w"][:, :1] - 1.0)
    return linear_loss(params, batch), jnp.mean(errors < 10.0)


def finite(params, batch):
    errors = (batch["x"] @ params["w"][:, 0] - batch["y"]) ** 2
    return jnp.nansum(errors), jnp.sum(jnp.isfinite(errors))


def focal(params, batch):
    """Losses are averaged with weights that depend on the params."""
    errors = (batch["x"] @ params["w"][:, 0] - batch["y"]) ** 2
    weights = 1 - jnp.exp(-errors)
    return jnp.sum(weights * errors), jnp.sum(weights)


FEEDS = {
    "arrays": {},
    "streams": {"train_data": fitting.batches},
    "replicas": {
        "tx": optperm.diloco(optax.sgd(0.01), every=2, axis_name="replica"),
        **fitting.on(2, mapped=True),
    },
}


@pytest.mark.parametrize(
    ("loss_fn", "feed"),
    support.every_night(
        itertools.product((with_metric, finite, focal, pair), FEEDS),
        [
            *((with_metric, "streams"), (finite, "arrays"), (pair, "replicas")),
        ],
    ),
)
def test_a_metric_in_place_of_a_count_is_said(loss_fn, feed):
    """Sums of weights and of finite losses are counts."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_fit(loss_fn, steps=2, **FEEDS[feed])
    found = [each.filename for each in caught if str(each.message) == NOT_COUNT]
    assert found == [fitting.__file__] * (loss_fn is with_metric)


def test_a_mean_with_a_constant_is_no_sum_for_a_sampler():
    """It would divide the loss by the constant, and widen the posterior."""
    with pytest.warns(UserWarning, match="its second value for a batch is not the sum"):
        linear_fit(lambda p, batch: (linear_loss(p, batch), 8), tx=SGLD, steps=1)


def large_in_between(rate):
    """A schedule whose updates round to nothing for less than 100 steps at a time."""
    return lambda count: jnp.where((count > 75) & (count < 125), 1e4, 1.0) * rate


@pytest.mark.parametrize(
    ("make", "dtype", "steps", "is_said"),
    [
        (optax.sgd, "bfloat16", 200, True),
        (optax.sgd, "bfloat16", 125, False),  # rows at steps 50 and 100
        pytest.param(optax.sgd, "float32", 200, False, marks=pytest.mark.exhaustive),
        pytest.param(
            lambda rate: optax.sgd(1e4 * rate),
            *("bfloat16", 200, False),
            marks=pytest.mark.exhaustive,
        ),
        (lambda rate: optax.sgd(large_in_between(rate)), "bfloat16", 200, False),
        (lambda rate: optperm.widen_params(optax.sgd(rate)), "bfloat16", 200, False),
        pytest.param(
            lambda rate: optperm.widen_params(optax.sgd(rate), bits=0),
            *("bfloat16", 200, False),
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_updates_that_round_to_nothing_for_100_steps_are_said_once(make, dtype, steps, is_said):
    params = fitting.linear_params(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        linear_fit(tx=make(1e-5), params=params, steps=steps)
    found = [each.filename for each in caught if str(each.message) == LOST_UPDATES]
    assert found == [fitting.__file__] * is_said
