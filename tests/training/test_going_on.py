"""Going on with what an earlier `fit` returned: what is refused, and what is kept."""

import dataclasses

import fitting
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import support
from fitting import BATCH, data, linear_fit, linear_loss
from flax import nnx

from optperm import training


def go_on(result, train_data=None, loss_fn=linear_loss, **options):
    train_data = data() if train_data is None else train_data
    return training.fit(result, loss_fn, train_data, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch_size", {"batch_size": 2 * BATCH}),
        ("seed", {"batch_size": BATCH, "seed": 1}),
        ("train_data", {"batch_size": BATCH, "train_data": {k: v[:16] for k, v in data().items()}}),
        ("digest", {"batch_size": BATCH, "train_data": {k: v[::-1] for k, v in data().items()}}),
        ("train_data", {"train_data": fitting.batches}),
    ],
)
def test_an_epoch_goes_on_with_its_own_batches(name, options, tmp_path):
    """Another order would begin in its middle; a run between two epochs may take what it likes."""
    part = linear_fit(steps=7, checkpoints=tmp_path)
    with pytest.raises(ValueError, match=f"after 2 steps of epoch 2.*{name}.* is .* there and"):
        go_on(part, steps=20, checkpoints=tmp_path, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]
    whole = go_on(part, epochs=2, batch_size=BATCH)
    assert go_on(whole, epochs=3, **options).epoch == 3


def test_arrays_do_not_go_on_within_an_epoch_of_batches():
    part = linear_fit(train_data=fitting.batches, steps=7)
    with pytest.raises(ValueError, match="train_data is an iterable of batches there and"):
        go_on(part, steps=20, batch_size=BATCH)


def test_a_result_of_batches_is_gone_on_with_twice():
    """A list begins anew, and what was taken before is dropped; an iterator has gone on."""
    batches = list(fitting.batches(1))
    whole = linear_fit(train_data=batches, steps=5)
    part = linear_fit(train_data=batches, steps=2)
    for _ in range(2):
        on = go_on(part, batches, steps=4)
        np.testing.assert_array_equal(on.history.steps["loss"], whole.history.steps["loss"][:4])
    support.assert_same_bits(
        go_on(on, batches, steps=5).history.steps["loss"], whole.history.steps["loss"]
    )
    once = iter(batches)
    part = linear_fit(train_data=once, steps=2)
    go_on(part, once, steps=3)
    with pytest.raises(ValueError, match="can be gone through only once, and is needed again"):
        go_on(part, once, steps=3)


def test_a_batch_that_failed_is_not_passed_over():
    """The iterator had given it when the loss function failed."""
    batches = list(fitting.batches(1))
    part = linear_fit(train_data=batches, steps=2)
    with pytest.raises(ZeroDivisionError):
        go_on(part, batches, lambda params, batch: 1 / 0, steps=3)
    whole = linear_fit(train_data=batches, steps=3)
    on = go_on(part, batches, steps=3)
    np.testing.assert_array_equal(on.history.steps["loss"], whole.history.steps["loss"])


def loss_with_aux(params, batch):
    loss = linear_loss(params, batch)
    return loss, {"half": loss / 2}


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("steps", [5, 7])
@pytest.mark.parametrize("is_dropped", [True, False])
def test_metrics_come_and_go(is_kept, steps, is_dropped, tmp_path):
    """They are NaN in the steps that had none, and so is the mean over an epoch with both."""
    phases = [(loss_with_aux, True), (linear_loss, False)]
    (first, aux), (then, later_aux) = phases if is_dropped else phases[::-1]
    where = {"checkpoints": tmp_path} if is_kept else {}
    part, seen = linear_fit(first, steps=steps, has_aux=aux, **where), []
    options = where | {"has_aux": later_aux, "every": {1: seen.append}, "batch_size": BATCH}
    if is_kept:
        on = linear_fit(then, epochs=3, resume=True, checkpoint_every=3, **options)
    else:
        on = go_on(part, loss_fn=then, epochs=3, **options)
    half = on.history.steps["loss"] / 2
    half[steps:] = np.nan if is_dropped else half[steps:]
    half[:steps] = half[:steps] if is_dropped else np.nan
    np.testing.assert_array_equal(on.history.steps["half"], half)
    assert all(("half" in event.metrics) != is_dropped for event in seen)
    means = on.history.epochs["half"]
    expected = half.reshape(3, 5).mean(axis=1)
    np.testing.assert_allclose(means, expected, rtol=1e-6)
    assert training.fit(on, then, data(), epochs=3, batch_size=BATCH, has_aux=later_aux).step == 15


def test_metrics_that_not_every_batch_has():
    def metrics(params, batch):
        small = {"small": jnp.float32(1.0)} if batch["x"].shape[0] < BATCH else {}
        return {"loss": linear_loss(params, batch), **small}

    def loss_fn(params, batch):
        out = metrics(params, batch)
        return out.pop("loss"), out

    batches = [*fitting.batches(1), {name: leaf[:3] for name, leaf in data().items()}]
    result = linear_fit(loss_fn, batches, epochs=1, has_aux=True)
    np.testing.assert_array_equal(result.history.steps["small"], [*[np.nan] * 5, 1.0])
    evaluation = {"eval_fn": metrics, "eval_data": batches}
    with pytest.raises(ValueError, match=r"the same metrics for every batch, got .*'small'"):
        linear_fit(epochs=1, **evaluation)


def test_names_of_metrics_are_strings():
    with pytest.raises(TypeError, match="by names that are strings, got the name 3"):
        linear_fit(lambda *args: (linear_loss(*args), {3: 1.0}), steps=1, has_aux=True)


def test_a_manager_that_tracks_the_best_is_given_metrics(tmp_path):
    """It saves at the ends of epochs, and what is saved within one when training ends is no best."""

    def eval_fn(params, batch):
        return {"loss": linear_loss(params, batch)}

    options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda row: -row["eval_loss"])
    evaluation = {"eval_fn": eval_fn, "eval_data": data()}
    with ocp.CheckpointManager(tmp_path / "best", options=options) as manager:
        whole = linear_fit(epochs=4, checkpoints=manager, **evaluation)
        assert manager.all_steps() == [15, 20]
        assert manager.best_step() == 20
        stop = {"every": {23: lambda event: True}}
        linear_fit(epochs=6, checkpoints=manager, resume=True, **evaluation, **stop)
        assert manager.all_steps() == [15, 20, 23]
        assert manager.best_step() == 20
        on = linear_fit(epochs=5, checkpoints=manager, resume=True, **evaluation)
        assert manager.best_step() == 25
    np.testing.assert_array_equal(
        on.history.epochs["eval_loss"][:4], whole.history.epochs["eval_loss"]
    )
    options = ocp.CheckpointManagerOptions(max_to_keep=1, best_fn=lambda row: row["eval_valeu"])
    with (
        ocp.CheckpointManager(tmp_path / "none", options=options) as manager,
        pytest.raises(training.CheckpointError, match="eval_valeu") as caught,
    ):
        linear_fit(epochs=4, checkpoints=manager, **evaluation)
    assert caught.value.result.step == 10  # where Orbax compares two


def test_a_run_that_diverges_is_saved_before_it_is_said(tmp_path):
    """Where warnings are errors, as they are here."""
    with pytest.raises(RuntimeWarning, match="stopped being finite at step 1 of 3"):
        linear_fit(lambda *args: jnp.nan * linear_loss(*args), steps=3, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]


def test_random_keys_among_the_examples(tmp_path):
    """Other ones are other data."""

    def loss_fn(params, batch):
        return linear_loss(params, batch) + jax.random.normal(batch["key"][0])

    def run(seed, **options):
        keys = jax.random.split(jax.random.key(seed), fitting.EXAMPLES)
        where = {"batch_size": BATCH, "checkpoints": tmp_path}
        return linear_fit(loss_fn, {**data(), "key": keys}, **where, **options)

    run(0, steps=3)
    assert run(0, steps=7, resume=True).step == 7
    with pytest.raises(ValueError, match="the digest of train_data is"):
        run(1, steps=9, resume=True)


@pytest.mark.parametrize("kind", fitting.KINDS)
@pytest.mark.parametrize("part", ["params", "opt_state", "another fit"])
def test_what_has_changed_since_is_not_gone_on_with(kind, part):
    """What was trained is pruned, say, and would be overwritten."""
    result = fitting.fit(kind, "adam", steps=7)
    changed, loss_fn = result, fitting.LOSS[kind]
    options = {"train_data": data(), "batch_size": BATCH}
    if part == "another fit":
        training.fit(result, loss_fn, steps=8, **options)
    elif kind == "nnx":
        for variable in jax.tree.leaves(
            nnx.state(result.model, nnx.Param) if part == "params" else result.optimizer.opt_state,
            is_leaf=lambda node: isinstance(node, nnx.Variable),
        ):
            variable.set_value(2 * variable.get_value())
    else:
        double = jax.tree.map(lambda x: 2 * x, getattr(result.state, part))
        changed = dataclasses.replace(result, state=result.state.replace(**{part: double}))
    if part == "another fit" and kind == "linen":  # each state is one of its own
        assert training.fit(result, loss_fn, steps=8, **options).step == 8
        return
    with pytest.raises(ValueError, match=r"have changed since .*to begin anew from"):
        training.fit(changed, loss_fn, steps=9, **options)


def test_data_and_methods_that_are_almost_right():
    with pytest.raises(
        TypeError, match=r"a function of the epoch's number, lambda epoch: \.\.\., "
    ):
        linear_fit(train_data=lambda: fitting.batches(1), epochs=1)
    every_second = optax.MultiSteps(optax.adam(0.1), 2)
    with pytest.raises(
        TypeError, match=r"adam\(1e-3\), got <.*MultiSteps.*gradient_transformation\(\)"
    ):
        linear_fit(tx=every_second, epochs=1)
    assert linear_fit(tx=every_second.gradient_transformation(), epochs=1).epoch == 1


class Counting:
    """Batches that follow from their number, by an iterator that can be put at any."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return {name: np.roll(leaf, self.at, axis=0)[:BATCH] for name, leaf in data().items()}

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_a_batch_that_failed_is_taken_when_a_run_is_resumed(tmp_path):
    """A checkpoint is written after an error, and the iterator had given one batch more by then."""

    class Failing(Counting):
        def __next__(self):
            batch = super().__next__()
            if self.at == 4:
                raise ZeroDivisionError
            return batch

    where = {"checkpoints": tmp_path}
    whole = linear_fit(train_data=Counting(), steps=6)
    with pytest.raises(ZeroDivisionError):
        linear_fit(train_data=Failing(), steps=6, **where)
    assert [path.name for path in tmp_path.iterdir()] == ["3"]
    resumed = linear_fit(train_data=Counting(), steps=6, resume=True, **where)
    np.testing.assert_array_equal(resumed.history.steps["loss"], whole.history.steps["loss"])
