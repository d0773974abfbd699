"""The choice of the highest scores, by NumPy's stable sort."""

import numpy as np


def highest(scores, count):
    """Return whether each is among the highest: of equal ones the first, NaN before all."""
    flat = np.asarray(scores, np.float64).ravel() + 0.0  # -0 is 0
    order = np.lexsort((np.arange(flat.size), -flat, ~np.isnan(flat)))
    kept = np.zeros(flat.size, bool)
    kept[order[:count]] = True
    return kept.reshape(np.shape(scores))
