"""Rows of the history, events, early stopping, best params and writers."""

import itertools
import types

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import support
from fitting import DATA, EVALUATION, linear_fit, linear_loss

from optperm import training


def endless(epoch=1):
    return itertools.cycle(fitting.batches(1))


def test_stream_without_an_end_has_rows_of_its_evaluations(tmp_path):
    """Also where the run is resumed."""
    options = {"train_data": endless, "eval_every": 5, **EVALUATION}
    whole = linear_fit(steps=23, **options)
    rows = whole.history.epochs
    assert rows["step"].tolist() == [5, 10, 15, 20, 23]
    assert rows["epoch"].tolist() == [1] * 5
    means = [part.mean() for part in np.split(whole.history.steps["loss"], [5, 10, 15, 20])]
    np.testing.assert_allclose(rows["loss"], means, rtol=1e-6)
    linear_fit(steps=13, checkpoints=tmp_path, **options)
    resumed = linear_fit(steps=23, checkpoints=tmp_path, resume=True, **options)
    for name in ("step", "loss", "eval_loss"):
        np.testing.assert_array_equal(resumed.history.epochs[name], rows[name])


def test_rows_of_epochs_stay_beside_those_within_them():
    """Callbacks of epochs are called at ends of epochs alone, found late or not."""
    for train_data in (DATA, fitting.batches, list(fitting.batches(1))):
        for eval_every, steps in ((2, [2, 4, 5, 6, 8, 10]), (5, [5, 10])):
            ends, seen = [], []
            options = {"train_data": train_data, "epochs": 2, "eval_every": eval_every}
            options |= {"on_epoch_end": lambda event, ends=ends: ends.append(event.step)}
            note = lambda event, seen=seen: seen.append(event.history.last["step"])  # noqa: E731
            result = linear_fit(every={5: note}, **options, **EVALUATION)
            assert result.history.epochs["step"].tolist() == steps
            assert ends == [5, 10]
            # Of known length, an epoch ends with its last step: its row comes before the callbacks.
            assert seen == [5, 10] or train_data is fitting.batches
            assert len(seen) == 2


def test_callbacks_of_epochs_are_called_where_steps_end_a_run_with_an_evaluation():
    ends = []
    note = {"on_epoch_end": lambda event: ends.append(event.step)}
    linear_fit(steps=4, eval_every=2, **note, **EVALUATION)
    assert ends == [4]


def test_events_of_any_calls_come_at_their_steps():
    """With the means since the event before, the state and an evaluation of then."""
    seen, later = [], []

    def note(event):
        seen.append((event.step, event.metrics["loss"], event.evaluate()["loss"]))
        exact = linear_loss(event.state.params, DATA)
        np.testing.assert_allclose(seen[-1][2], exact, rtol=1e-5)
        assert int(event.state.step) == event.step

    every = {1: later.append, 3: note, 4: [print, lambda event: event.step == 12]}
    result = linear_fit(epochs=9, every=every, **EVALUATION)
    assert (result.ended, result.step) == ("stopped", 12)
    losses = result.history.steps["loss"]
    assert [step for step, _, _ in seen] == [3, 6, 9, 12]
    np.testing.assert_array_equal([event.metrics["loss"] for event in later], losses)
    for step, mean, _ in seen:
        np.testing.assert_allclose(mean, losses[step - 3 : step].mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        linear_fit(steps=1, every={1: lambda event: event.evaluate() and None})


def test_early_stopping_ends_a_stream_and_its_resumed_run(tmp_path):
    """Wherever it is passed."""
    still = {"eval_fn": lambda *args: {"loss": jnp.float32(1.0)}, "eval_data": DATA}
    stop = training.EarlyStopping("eval_loss", 2)
    for index, where in enumerate(({"on_epoch_end": stop}, {"every": {1: stop}})):
        options = {"checkpoints": tmp_path / str(index), "eval_every": 3, **where, **still}
        for resume in (False, True):
            result = linear_fit(train_data=endless, steps=99, resume=resume, **options)
            assert (result.ended, result.step) == ("stopped", 9)


def test_early_stopping_counts_only_rows_with_its_metric(tmp_path):
    """A resumed run has an evaluation, which the earlier run did not have."""
    stop = {"on_epoch_end": training.EarlyStopping("eval_loss", 2), **EVALUATION}
    linear_fit(epochs=3, checkpoints=tmp_path)
    result = linear_fit(epochs=5, checkpoints=tmp_path, resume=True, **stop)
    assert np.isfinite(result.history.epochs["eval_loss"]).tolist() == [False] * 3 + [True] * 2
    assert (result.ended, result.step) == ("finished", 25)


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
        assert stop(types.SimpleNamespace(history=history, is_row=True)) == wanted


@pytest.mark.parametrize(
    "arguments",
    [{"patience": 0}, {"patience": True}, {"min_delta": float("nan")}, {"mode": "least"}],
)
def test_early_stopping_of_arguments_out_of_range_is_refused(arguments):
    with pytest.raises((ValueError, TypeError), match=f"{next(iter(arguments))} must be"):
        training.EarlyStopping("loss", **{"patience": 3, **arguments})


@pytest.mark.parametrize("kind", support.every_night(["linen", "nnx"], ["linen"]))
def test_best_params_are_those_of_the_best_evaluation(kind):
    states = {}
    note = {"every": {1: lambda event: states.update({event.step: event.state})}}
    options = {"eval_fn": fitting.ACCURACY[kind], "eval_data": DATA, "eval_every": 2}
    best = {"keep_best": ("eval_accuracy", "max")}
    result = fitting.fit(kind, "adam", steps=8, **options, **note, **best)
    column, steps = (result.history.epochs[name] for name in ("eval_accuracy", "step"))
    assert result.best_step == steps[np.argmax(column)]
    assert np.any(column != column[0])
    trained = result.best_state, states[result.best_step]
    support.assert_same_bits(*map(fitting.params_of, trained))


def test_names_of_columns_that_are_misspelt_are_found_as_soon_as_they_can_be():
    """Of an evaluation of arrays before the first step, of a step's metrics in the first call, of
    streams with their first row; right ones pass."""
    seen = []
    of_arrays = {"every": {1: seen.append}, **EVALUATION}
    of_streams = of_arrays | {"eval_data": lambda epoch: [DATA]}
    stop = training.EarlyStopping
    for wrong, options, step in [
        ({"on_epoch_end": stop("eval_lsos", 1)}, of_arrays, 0),
        ({"keep_best": "lsos"}, of_arrays, 0),
        ({"keep_best": "eval_lsos"}, of_streams, 4),
        ({"keep_best": "lsos"}, of_streams | {"train_data": fitting.batches}, 5),
    ]:
        seen.clear()
        with pytest.raises(ValueError, match=r"the metric '(eval_)?l(os|so)s', but rows have"):
            linear_fit(epochs=2, **{**options, **wrong})
        assert len(seen) == step, wrong
    right = {"keep_best": "loss", "on_epoch_end": stop("eval_loss", 9), **EVALUATION}
    assert linear_fit(epochs=2, **right).best_step == 10


def test_row_of_nan_is_never_the_best():
    rates = iter([1.0, np.nan, 0.5, 0.7])
    data_of = lambda epoch: [np.full((4, 1), next(rates), np.float32)]  # noqa: E731
    evaluation = {"eval_fn": lambda params, batch: {"value": jnp.mean(batch)}, "eval_data": data_of}
    assert linear_fit(epochs=4, keep_best="eval_value", **evaluation).best_step == 15


def test_padded_batches_are_evaluated_by_sums_and_counts():
    """The padding of the last batch does not count, for any values."""
    # Batches of 16; the last batch contains only padding.
    padded = {"y": np.pad(DATA["y"], (0, 24)), "mask": np.arange(64) < 40}
    padded["x"] = np.pad(DATA["x"], [(0, 24), (0, 0)], constant_values=99.0)

    def eval_fn(params, batch):
        logits = batch["x"] @ params["w"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        weights = batch["mask"].astype(jnp.float32)
        pair = jnp.sum(losses * weights), jnp.sum(weights)
        return {"loss": pair, "rows": jnp.float32(len(weights))}

    options = {"epochs": 1, "eval_fn": eval_fn, "eval_batch_size": 16}
    result = linear_fit(eval_data=padded, **options)
    exact = linear_loss(result.state.params, DATA)
    np.testing.assert_allclose(result.history.last["eval_loss"], exact, rtol=1e-6)
    assert result.history.last["eval_rows"] == 16
    result = linear_fit(eval_data=jax.tree.map(lambda leaf: leaf[48:], padded), **options)
    assert np.isnan(result.history.last["eval_loss"])


class Clu(list):
    def write_scalars(self, step, scalars):
        self.extend((step, *each) for each in scalars.items())


class Board(list):
    def add_scalar(self, name, value, step):
        self.append((step, name, value))


def test_writer_gets_each_quantity_under_a_tag_of_its_own(monkeypatch):
    """Once a step, with the learning rate, and without what is no metric; from process 0 alone."""
    tx = optax.inject_hyperparams(optax.sgd)(optax.linear_schedule(1.0, 0.0, 10))
    written = []
    for writer in (Clu(), Board()):
        write = training.metrics_writer(writer)
        options = {"every": {5: write, 2: write}, "on_epoch_end": write, "eval_every": 3}
        result = linear_fit(tx=tx, epochs=2, **options, **EVALUATION)
        tags = [(step, name) for step, name, _ in writer]
        assert len(tags) == len(set(tags))
        written.append(sorted(writer))
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
    training.metrics_writer(other := Clu())(
        training.Event(2, 10, result.history, True, dict, dict, dict)
    )
    assert other == []


def test_metric_that_not_every_batch_has_is_nan_in_the_other_steps():
    def metrics(params, batch):
        small = {"small": jnp.float32(1.0)} if batch["x"].shape[0] < fitting.BATCH else {}
        return {"loss": linear_loss(params, batch), **small}

    def loss_fn(params, batch):
        out = metrics(params, batch)
        return out.pop("loss"), out

    batches = [*fitting.batches(1), {name: leaf[:3] for name, leaf in DATA.items()}]
    result = linear_fit(loss_fn, batches, epochs=1, has_aux=True)
    np.testing.assert_array_equal(result.history.steps["small"], [*[np.nan] * 5, 1.0])
    with pytest.raises(ValueError, match=r"the same metrics for every batch, got .*'small'"):
        linear_fit(epochs=1, eval_fn=metrics, eval_data=batches)
