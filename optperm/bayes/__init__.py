"""Sampling a posterior.

Constant SGD, and what to do with its draws. See ``examples/constant_sgd_posterior.py``.
"""
