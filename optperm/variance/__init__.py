"""Variance reduction.

SVRG and the exact gradients that it needs. See ``examples/svrg_regression.py`` and
``examples/svrg_logistic.py``.
"""
