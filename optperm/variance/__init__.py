"""Variance reduction.

SVRG and the full gradients that it needs, recursive estimators (STORM, SARAH, SPIDER, PAGE), MARS, and
proximal steps for penalties and bounds.
They solve convex problems to many digits. On networks SGD with a good rate is better after the same
number of gradients: `benchmarks/svrg.py` has the tables. See ``examples/svrg_regression.py`` and
``examples/svrg_logistic.py``.
"""
