"""Pictures show the numbers of the table."""

from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np

from numpyro_ext.sequences import (
    Bigram,
    EventSequences,
    OwnFrequencies,
    Uniform,
    compare_sequences,
    plot_error_by_entropy,
    plot_error_by_history,
    plot_training,
)

matplotlib.use("Agg")


def test_lines_are_the_errors_of_the_groups():
    rng = np.random.default_rng(0)
    log = EventSequences.from_lists([rng.choice(list("abc"), size=n) for n in (10, 20, 50, 60, 120, 400)])
    table = compare_sequences({"u": Uniform(), "b": Bigram(0.1), "own": OwnFrequencies(0.0)}, log.split())
    for plot, name in ((plot_error_by_history, "by_history"), (plot_error_by_entropy, "by_entropy")):
        axis = plot(table)
        lines = [bars.lines[0] for bars in axis.containers]
        for scores, line in zip(table.scores.values(), lines, strict=True):
            errors = np.array([score.error for score in getattr(scores, name).values()])
            np.testing.assert_allclose(line.get_ydata(), errors[np.isfinite(errors)])
        assert [text.get_text() for text in axis.get_legend().get_texts()] == ["u", "b", "own"]
        assert plot(table, axis=axis) is axis
    plt.close("all")


def test_training_is_drawn_with_the_epoch_that_was_kept():
    errors = np.array([2.0, 1.2, 1.5])
    fit = SimpleNamespace(losses=np.array([3.0, 2.0, 1.0]), validation_errors=errors, best_epoch=2, is_sequential=True)
    axis = plot_training(fit)
    training, validation, kept = (line.get_xydata() for line in axis.lines)
    np.testing.assert_array_equal(training, [[1, 3], [2, 2], [3, 1]])
    np.testing.assert_array_equal(validation[:, 1], errors)
    np.testing.assert_array_equal(kept, [[2, 1.2]])
    plt.close("all")
