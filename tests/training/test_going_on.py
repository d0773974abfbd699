"""Going on with what an earlier `fit` returned: what is refused, and what is kept."""

import fitting
import jax.numpy as jnp
import numpy as np
import pytest
import support
from fitting import BATCH, data

from optperm import training


def linear_loss(params, batch):
    return fitting.cross_entropy(batch["x"] @ params["w"], batch["y"])


def linear_fit(loss_fn=linear_loss, train_data=None, tx=None, **options):
    """Of few params; with the data of all these tests."""
    params = {"w": jnp.ones((fitting.FEATURES, fitting.CLASSES))}
    tx = fitting.method("adam") if tx is None else tx
    state = training.TrainState.create(apply_fn=None, params=params, tx=tx)
    if train_data is None:
        options.setdefault("batch_size", BATCH)
    return training.fit(state, loss_fn, data() if train_data is None else train_data, **options)


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
