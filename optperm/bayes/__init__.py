"""Sampling a posterior.

Constant SGD and Langevin dynamics, and what to do with their draws.
See ``examples/constant_sgd_posterior.py``.
"""
