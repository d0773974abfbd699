import json

import numpy as np

from optperm.training import History


def recorded():
    history = History()
    history.add_steps({"loss": np.array([4.0, 2.0], np.float32)})
    history.add_epoch(epoch=1, step=2, seconds=0.5, evaluated={"loss": 2.5})
    history.add_steps({"loss": np.array([1.0], np.float32)})
    history.add_steps({"loss": np.array([0.1], np.float32)})
    history.add_epoch(epoch=2, step=4, seconds=0.25, evaluated={"loss": np.float32(0.7)})
    return history


def test_arrays_and_json_hold_all_of_it():
    history = recorded()
    rows = json.loads(json.dumps(history.epoch_rows))
    other = History(history.steps, rows)
    for name in ("steps", "epochs"):
        for column, value in getattr(history, name).items():
            np.testing.assert_array_equal(getattr(other, name)[column], value)
            assert getattr(other, name)[column].dtype == value.dtype
    copy = History(history.steps, history.epoch_rows)
    copy.add_steps({"loss": np.ones(3, np.float32)})
    assert (history.num_steps, copy.num_steps, other.num_steps) == (4, 7, 4)
    # Over parts of unequal length, and over all there are.
    assert copy.means(2) == {"loss": 1.0}
    assert copy.means(4) == {"loss": float(np.mean(np.float32([0.1, 1, 1, 1]), dtype=float))}
    assert copy.means(99)["loss"] == np.mean(copy.steps["loss"], dtype=float)
