"""Every method through `fit`, stopped within an epoch and gone on with: bit for bit the whole run."""

import itertools
import shutil

import fitting
import numpy as np
import pytest
import support
from fitting import BATCH

import optperm
from optperm import training
from optperm.contract.states import find_state
from optperm.training import steps


def assert_same_run(resumed, whole):
    support.assert_same_bits(fitting.arrays(resumed), fitting.arrays(whole))
    support.assert_same_bits(resumed.history.steps, whole.history.steps)
    for rows in (resumed.history.epochs, whole.history.epochs):
        assert np.all(rows.pop("seconds") > 0)
        rows.pop("eval_accuracy", None)
    assert resumed.history.num_steps == 15


# Each method once; linen and nnx, one device and four, in turns.
CASES = [("linen", "adam", None), ("linen", "laperm", None), ("linen", "dldr", None)]
CASES += [("nnx", "sgperm", None), ("nnx", "diloco", 4), ("nnx", "svrg", 4)]
CASES += [("linen", "agn", 4), ("linen", "constant_sgd", 4)]


@pytest.mark.parametrize(("kind", "name", "devices"), CASES)
def test_a_run_that_is_resumed_is_the_one_that_went_on(kind, name, devices, tmp_path):
    """15 steps in three epochs; stopped after 9, when dldr has just switched and svrg has a snapshot."""
    options = {"devices": devices, "eval_fn": fitting.ACCURACY[kind], "eval_data": fitting.data()}
    whole = fitting.fit(kind, name, epochs=3, steps_per_call=4, **options)
    assert (whole.ended, whole.epoch, whole.step) == ("finished", 3, 15)
    folder = tmp_path / "kept"
    stopped = fitting.fit(kind, name, steps=9, checkpoints=folder, checkpoint_every=2, **options)
    assert (stopped.epoch, stopped.step) == (1, 9)
    assert sorted(int(path.name) for path in folder.iterdir()) == [2, 4, 6, 8, 9]
    # The row of a part of an epoch is of that run alone. Step 8 ended the second call of its epoch.
    shutil.rmtree(folder / "9")
    resumed = fitting.fit(kind, name, epochs=3, checkpoints=folder, resume=True, **options)
    assert_same_run(resumed, whole)
    rows = resumed.history.epochs, whole.history.epochs
    assert [list(each["step"]) for each in rows] == [[5, 10, 15]] * 2
    np.testing.assert_array_equal(rows[0]["eval_accuracy"], rows[1]["eval_accuracy"])
    # The state has moved on since, and it was not SGD that moved it.
    assert np.any(whole.history.steps["loss"][7:] != whole.history.steps["loss"][:8])
    opt_state = whole.optimizer.opt_state if kind == "nnx" else whole.state.opt_state
    if name == "dldr":
        state = find_state(opt_state, optperm.DldrState, method="dldr")
        assert state.second.subspace.is_set
        assert int(state.count) == 15
    if name == "svrg":
        assert find_state(opt_state, optperm.SvrgState, method="svrg").snapshot.is_taken


@pytest.mark.parametrize("kind", fitting.KINDS)
def test_a_result_is_gone_on_with(kind):
    """Four replicas each with a state of its own, in the middle of a period."""
    whole = fitting.fit(kind, "agn", epochs=3, devices=4)
    part = fitting.fit(kind, "agn", steps=7, devices=4)
    batch = {"batch_size": BATCH, "devices": 4}
    gone_on = training.fit(part, fitting.LOSS[kind], fitting.data(), epochs=3, **batch)
    assert_same_run(gone_on, whole)
    assert part.history.num_steps == 7
    again = training.fit(gone_on, fitting.LOSS[kind], fitting.data(), epochs=3, **batch)
    assert (again.ended, again.step) == ("finished", 15)
    # On the same devices, unless others are named.
    part = fitting.fit(kind, "agn", steps=7, devices=4)  # a model of nnx has gone on itself
    without = training.fit(part, fitting.LOSS[kind], fitting.data(), epochs=3, batch_size=BATCH)
    assert_same_run(without, whole)
    plain = fitting.fit(kind, "adam", steps=2, devices=2)
    assert not plain._end[0].own
    with pytest.raises(ValueError, match="had each its own, and here they have one state"):
        steps.moved(*part._end[:2], plain._end[0])


def test_an_iterable_is_resumed_within_an_epoch(tmp_path):
    """Batches that were taken before are dropped; and it gives what arrays give."""
    options = {"train_data": fitting.batches, "devices": 4}
    whole = fitting.fit("linen", "svrg", epochs=3, **options)
    where = {"checkpoints": tmp_path, "checkpoint_every": 7}
    fitting.fit("linen", "svrg", steps=8, **where, **options)
    resumed = fitting.fit("linen", "svrg", epochs=3, resume=7, **where, **options)
    assert_same_run(resumed, whole)
    runs = [
        fitting.fit("linen", "adam", epochs=1, devices=4),
        fitting.fit("linen", "adam", epochs=1, **options),
    ]
    np.testing.assert_allclose(*(run.history.steps["loss"] for run in runs), rtol=1e-5)


def test_what_cannot_be_resumed_is_refused(tmp_path):
    where = {"checkpoints": tmp_path / "kept", "checkpoint_every": 5}
    fitting.fit("linen", "adam", epochs=2, checkpoint_keep=1, **where)
    assert [path.name for path in where["checkpoints"].iterdir()] == ["10"]
    with pytest.raises(ValueError, match="holds checkpoints of an earlier run"):
        fitting.fit("linen", "adam", epochs=2, **where)
    with pytest.raises(ValueError, match="has none after that step, but after 10"):
        fitting.fit("linen", "adam", epochs=2, resume=4, **where)
    with pytest.raises(ValueError, match=r"of another run: seed is 0 there and 1 here\. Pass"):
        fitting.fit("linen", "adam", epochs=3, resume=True, seed=1, **where)
    with pytest.raises(ValueError, match=r"the form of the state is .*The optimizer, the model or"):
        fitting.fit("linen", "agn", epochs=3, resume=True, **where)
    with pytest.raises(ValueError, match="the kind of model is linen there and nnx here"):
        fitting.fit("nnx", "adam", epochs=3, resume=True, **where)
    done = fitting.fit("linen", "adam", epochs=2, resume=True, **where)
    assert (done.ended, done.step) == ("finished", 10)
    for file in (where["checkpoints"] / "10" / "state").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(training.CheckpointError, match="10 is damaged"):
        fitting.fit("linen", "adam", epochs=3, resume=True, **where)


def rows_of(result):
    """The rows of the epochs, but for how long they took."""
    return {name: list(rows) for name, rows in result.history.epochs.items() if name != "seconds"}


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_part_of_an_epoch_that_goes_on_has_one_row(is_kept, tmp_path):
    """Ended by `steps` in the middle of the second epoch, by a result or by a checkpoint."""
    options = {"eval_fn": fitting.ACCURACY["linen"], "eval_data": fitting.data()}
    whole = fitting.fit("linen", "adam", epochs=3, **options)
    where = {"checkpoints": tmp_path} if is_kept else {}
    part = fitting.fit("linen", "adam", steps=7, **where, **options)
    assert rows_of(part)["step"] == [5, 7]
    options |= {"epochs": 3}
    if is_kept:
        gone_on = fitting.fit("linen", "adam", resume=True, **where, **options)
    else:
        batch = {"batch_size": BATCH}
        gone_on = training.fit(part, fitting.LOSS["linen"], fitting.data(), **batch, **options)
    assert rows_of(gone_on) == rows_of(whole)
    assert rows_of(part)["step"] == [5, 7]


@pytest.mark.parametrize("failing", [2, 3])
def test_an_error_at_the_end_of_an_epoch_loses_no_row(failing, tmp_path):
    """The evaluation that failed is made when the run goes on, after the last epoch too."""
    options = {"eval_fn": fitting.ACCURACY["linen"], "epochs": 3}

    def all_data(epoch):
        return [fitting.data()]

    def failing_data(epoch):
        if epoch == failing:
            raise OSError("the disk is gone")
        return all_data(epoch)

    whole = fitting.fit("linen", "adam", eval_data=all_data, **options)

    with pytest.raises(OSError, match="gone"):
        fitting.fit("linen", "adam", eval_data=failing_data, checkpoints=tmp_path, **options)
    options |= {"checkpoints": tmp_path, "resume": True}
    resumed = fitting.fit("linen", "adam", eval_data=all_data, **options)
    assert rows_of(resumed) == rows_of(whole)


def test_a_callback_that_exits_saves_first(tmp_path):
    def leave(event):
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        fitting.fit("linen", "adam", epochs=3, every={7: leave}, checkpoints=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_a_full_gradient_needs_batches_that_come_again():
    with pytest.raises(ValueError, match="this iterator gives them once"):
        fitting.fit("linen", "svrg", steps=5, train_data=itertools.cycle(fitting.batches(1)))
