"""The picture of a history shows its columns."""

import numpy as np
import pytest

from optperm.training import History


def make(loss):
    history = History({"loss": np.float32(loss), "fraction_moved": np.float32([0.5, 0.25])})
    history.add_epoch(1, 2, 0.1, {"loss": loss[1] + 1.0, "accuracy": 0.75})
    return history


def lines(axes):
    """The points of each line of some axes, without the empty line that takes a color."""
    return [np.transpose(line.get_data()).tolist() for line in axes.lines if line.get_xdata().size]


def test_plot_draws_steps_rows_and_evaluations_of_each_column():
    figure = make([3.0, 1.0]).plot()
    axes = {each.get_ylabel(): each for each in figure.axes}
    assert [*axes] == ["loss", "accuracy", "fraction moved"]
    assert lines(axes["loss"]) == [[[1, 3], [2, 1]], [[2, 2]], [[2, 2]]]
    assert lines(axes["accuracy"]) == [[[2, 0.75]]]
    assert lines(axes["fraction moved"]) == [[[1, 0.5], [2, 0.25]], [[2, 0.375]]]


def test_plot_of_a_second_history_shares_the_axes_in_another_color():
    figure = make([3.0, 1.0]).plot(label="Adam")
    assert make([5.0, 2.0]).plot(figure, label="SGD") is figure
    loss = figure.axes[0]
    assert lines(loss)[3:] == [[[1, 5], [2, 2]], [[2, 3.5]], [[2, 3]]]
    texts = [text.get_text() for text in loss.get_legend().get_texts()]
    assert texts == ["Adam", "Adam evaluated", "SGD", "SGD evaluated"]
    colors = [line.get_color() for line in loss.lines]
    assert len({*colors[:4]}) == len({*colors[4:]}) == 1
    assert colors[0] != colors[4]


def test_plot_of_an_empty_history_raises():
    with pytest.raises(ValueError, match="There is nothing to draw: the history has no rows yet"):
        History().plot()
