"""Variance reduction.

SVRG and the full gradients that it needs, Katyusha, recursive estimators (STORM, SARAH, SPIDER, PAGE),
MARS, and proximal steps for penalties and bounds.
They pay where a convex problem is to be solved to many digits; on networks SGD with a good rate and the
same number of gradients wins: `benchmarks/svrg.py` has the tables. See ``examples/svrg_regression.py``
and ``examples/svrg_logistic.py``.
"""
