"""Rows of the history, within epochs too: evaluations, early stopping, best params, writers."""

import functools
import itertools
import types

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import data, linear_fit, linear_loss

from optperm import training

EVALUATION = {"eval_fn": lambda *args: {"loss": linear_loss(*args)}, "eval_data": data()}


def endless(epoch=1):
    return itertools.cycle(fitting.batches(1))


def test_a_stream_without_an_end_has_rows_of_its_evaluations(tmp_path):
    """Also where the run is resumed; each row is that of its step."""
    seen = {}
    note = {5: lambda event: seen.update({event.step: event.evaluate()["loss"]})}
    run = functools.partial(linear_fit, train_data=endless, eval_every=5, **EVALUATION)
    whole = run(steps=23, every=note)
    rows = whole.history.epochs
    assert rows["step"].tolist() == [5, 10, 15, 20, 23]
    assert rows["epoch"].tolist() == [1] * 5
    np.testing.assert_allclose(rows["eval_loss"][:4], [*seen.values()], rtol=1e-6)
    means = [part.mean() for part in np.split(whole.history.steps["loss"], [5, 10, 15, 20])]
    np.testing.assert_allclose(rows["loss"], means, rtol=1e-6)
    run(steps=13, checkpoints=tmp_path)
    resumed = run(steps=23, checkpoints=tmp_path, resume=True)
    for name in ("step", "loss", "eval_loss"):
        np.testing.assert_array_equal(resumed.history.epochs[name], rows[name])


def test_rows_of_epochs_stay_beside_those_within_them():
    """Callbacks of epochs are called at ends of epochs alone, found late or not."""
    for train_data in (None, fitting.batches, list(fitting.batches(1))):
        ends = []
        options = {
            "eval_every": 2,
            "on_epoch_end": lambda event, ends=ends: ends.append(event.step),
        }
        result = linear_fit(train_data=train_data, epochs=2, **options, **EVALUATION)
        assert result.history.epochs["step"].tolist() == [2, 4, 5, 6, 8, 10]
        assert ends == [5, 10]
        ends.clear()
        options["eval_every"] = 5
        result = linear_fit(train_data=train_data, epochs=2, **options, **EVALUATION)
        assert result.history.epochs["step"].tolist() == [5, 10]
        assert ends == [5, 10]


def test_epochs_of_known_length_end_with_their_last_step():
    """Callbacks of that step see the row of the epoch."""
    for train_data in (None, list(fitting.batches(1))):
        seen = []
        note = lambda event, seen=seen: seen.append(event.history.last.get("step"))  # noqa: E731
        linear_fit(train_data=train_data, epochs=2, every={1: note})
        assert seen == [None] * 4 + [5] * 5 + [10]


def test_early_stopping_ends_a_stream(tmp_path):
    """Wherever it is passed; a run that it has stopped stops at once when it is resumed."""
    still = {"eval_fn": lambda *args: {"loss": jnp.float32(1.0)}, "eval_data": data()}
    stop = training.EarlyStopping("eval_loss", 2)
    for options in ({"on_epoch_end": stop}, {"every": {3: stop}}, {"every": {1: stop}}):
        options |= {"checkpoints": tmp_path / str(len(list(tmp_path.iterdir()))), **still}
        options["eval_every"] = 3
        for resume in (False, True):
            result = linear_fit(train_data=endless, steps=99, resume=resume, **options)
            assert (result.ended, result.step) == ("stopped", 9)


@pytest.mark.parametrize("kind", fitting.KINDS)
def test_the_best_params_are_kept(kind, tmp_path):
    """Those of the step at which the evaluation was best, also where the run is resumed."""
    states = {}
    note = {"every": {1: lambda event: states.update({event.step: event.state})}}
    options = {"eval_fn": fitting.ACCURACY[kind], "eval_data": data(), "eval_every": 2}
    best = {"keep_best": ("eval_accuracy", "max")}
    whole = fitting.fit(kind, "adam", epochs=3, **options, **note, **best)
    column = whole.history.epochs["eval_accuracy"]
    step = int(whole.history.epochs["step"][np.argmax(column)])
    assert whole.best_step == step
    assert np.any(column != column[0])

    def params_of(state):
        if kind == "linen":
            return state.params
        return state.out.kernel.get_value()

    support.assert_same_bits(params_of(whole.best_state), params_of(states[step]))
    where = {"checkpoints": tmp_path, "checkpoint_every": 3}
    fitting.fit(kind, "adam", steps=12, **where, **options, **best)
    resumed = fitting.fit(kind, "adam", epochs=3, resume=True, **where, **options, **best)
    assert resumed.best_step == step
    support.assert_same_bits(params_of(resumed.best_state), params_of(whole.best_state))
    assert fitting.fit(kind, "adam", epochs=1).best_state is None


def test_a_run_is_resumed_by_the_column_by_which_it_kept_the_best(tmp_path):
    """Params of the best row so far are in its checkpoints, of no other."""
    options = {"checkpoints": tmp_path, "resume": True, **EVALUATION}
    linear_fit(epochs=1, keep_best=("eval_loss", "max"), **options)
    with pytest.raises(ValueError, match=r"keep_best is \['eval_loss', 'max'\] there and .*'min'"):
        linear_fit(epochs=2, keep_best="eval_loss", **options)


def test_names_of_columns_that_are_misspelt_are_found_as_soon_as_they_can_be():
    """Of an evaluation of arrays before the first step, of a step's metrics in the first call, of
    streams with their first row; right ones pass."""
    seen = []
    of_arrays = {"every": {1: seen.append}, **EVALUATION}
    of_streams = of_arrays | {"eval_data": lambda epoch: [data()]}
    stop = training.EarlyStopping
    for wrong, options, step in [
        ({"keep_best": "eval_lsos"}, of_arrays, 0),
        ({"on_epoch_end": stop("eval_lsos", 1)}, of_arrays, 0),
        ({"keep_best": "eval_loss"}, {"every": {1: seen.append}}, 0),
        ({"keep_best": "lsos"}, of_arrays | {"steps_per_call": 2}, 0),
        ({"keep_best": "eval_lsos"}, of_streams, 4),
        ({"keep_best": "lsos"}, of_streams | {"train_data": fitting.batches}, 5),
    ]:
        seen.clear()
        with pytest.raises(ValueError, match=r"names '(eval_)?l(os|so)s'; rows have"):
            linear_fit(epochs=2, **{**options, **wrong})
        assert len(seen) == step, wrong
    right = {"keep_best": "loss", "on_epoch_end": stop("eval_loss", 9), **EVALUATION}
    assert linear_fit(epochs=2, **right).best_step == 10


def test_the_least_is_the_best_and_nan_never():
    rates = iter([1.0, np.nan, 0.5, 0.7])
    data_of = lambda epoch: [np.full((4, 1), next(rates), np.float32)]  # noqa: E731
    evaluation = {"eval_fn": lambda params, batch: {"value": jnp.mean(batch)}, "eval_data": data_of}
    result = linear_fit(epochs=4, keep_best="eval_value", **evaluation)
    assert result.best_step == 15
    with pytest.raises(ValueError, match="eval_every goes with eval_fn"):
        linear_fit(epochs=1, eval_every=2)
    once = {"eval_fn": EVALUATION["eval_fn"], "eval_data": iter(fitting.batches(1))}
    with pytest.raises(TypeError, match=r"eval_data is an iterator.* only once"):
        linear_fit(epochs=1, **once)


def test_padded_batches_are_evaluated_by_sums_and_counts():
    """What fills up the last batch counts for nothing, whatever it holds."""
    batches = []
    for low in range(0, 40, 16):
        part = {name: leaf[low : low + 16] for name, leaf in data().items()}
        fill = 16 - len(part["y"])
        x = np.pad(part["x"], [(0, fill), (0, 0)], constant_values=99.0)
        y, mask = np.pad(part["y"], (0, fill)), np.arange(16) < 16 - fill
        batches.append({"x": x, "y": y, "mask": mask, "scale": np.float32(2.0)})
    batches.append(batches[0] | {"mask": np.zeros(16, bool)})  # a batch of nothing but filling

    def eval_fn(params, batch):
        logits = batch["x"] @ params["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        weights = batch["mask"].astype(jnp.float32)
        total = jnp.sum(batch["scale"] * losses * weights)
        return {"loss": (total, jnp.sum(weights)), "rows": jnp.float32(len(weights))}

    result = linear_fit(epochs=1, eval_fn=eval_fn, eval_data=batches)
    exact = 2.0 * linear_loss(result.state.params, data())
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-6)
    assert result.history.last["eval_rows"] == 16
    result = linear_fit(epochs=1, eval_fn=eval_fn, eval_data=batches[-1:])
    assert np.isnan(result.history.last["eval_loss"])
    three = {"loss": (jnp.float32(1.0), jnp.ones(3))}
    with pytest.raises(TypeError, match=r"got 'loss' of shape \(3,\)"):
        linear_fit(epochs=1, eval_fn=lambda *_: three, eval_data=batches)


class Clu:
    def __init__(self):
        self.rows = []

    def write_scalars(self, step, scalars):
        self.rows += [(step, name, value) for name, value in scalars.items()]


class Board:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))


def test_a_writer_gets_each_quantity_under_a_tag_of_its_own(monkeypatch):
    """Once a step, with the learning rate, and without what is no metric; from process 0 alone."""
    tx = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 10))
    written = []
    for writer in (Clu(), Board()):
        write = training.metrics_writer(writer)
        options = {"every": {5: write, 2: write}, "on_epoch_end": write, "eval_every": 3}
        result = linear_fit(tx=tx, epochs=2, **options, **EVALUATION)
        tags = [(step, name) for step, name, _ in writer.rows]
        assert len(tags) == len(set(tags))
        written.append(sorted(writer.rows))
    assert written[0] == written[1]
    found = {(step, name): value for step, name, value in written[0]}
    rows, losses = result.history.epochs, result.history.steps["loss"]
    assert {name for _, name in found} == {
        *("loss", "learning_rate", "epoch_loss", "epoch_learning_rate", "eval_loss")
    }
    for index, step in enumerate(rows["step"]):
        assert found[step, "epoch_loss"] == rows["loss"][index]
        assert found[step, "eval_loss"] == rows["eval_loss"][index]
    np.testing.assert_allclose(found[5, "loss"], losses[:5].mean(), rtol=1e-6)
    np.testing.assert_allclose(found[8, "learning_rate"], 1 - 6.5 / 10, rtol=1e-6)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    write = training.metrics_writer(other := Clu())
    event = training.Event(1, 5, result.history, True, dict, dict, dict)
    write(event)
    assert other.rows == []


def test_names_of_other_libraries_are_answered_with_ours():
    for name, says in [
        ("validation_data", "Pass eval_data, and eval_fn"),
        ("callbacks", "Pass on_epoch_end, or every="),
        ("verbose", "Pass progress=True"),
        ("batchsize", r"Did you mean batch_size\?"),
        ("qqq", "unexpected keyword argument 'qqq'.$"),
    ]:
        with pytest.raises(TypeError, match=says):
            linear_fit(epochs=1, **{name: 1})


@pytest.mark.parametrize(("mode", "sign"), [("min", 1.0), ("max", -1.0)])
def test_row_is_better_only_by_more_than_min_delta(mode, sign):
    """Of rows that improve by less, as many as `patience` stop the run."""
    stop = training.EarlyStopping("eval_loss", 2, mode, min_delta=0.1)
    for values, wanted in (
        ([1.0, 0.95, 0.92], True),
        ([1.0, 0.95, 0.85], False),
        ([1.0, 0.95], False),
        ([1.0, 0.8, 0.75, 0.72], True),
    ):
        rows = [{"epoch": n, "step": n, "eval_loss": sign * x} for n, x in enumerate(values, 1)]
        history = training.History(epoch_rows=rows)
        assert stop(types.SimpleNamespace(history=history)) == wanted
