"""Sampling a posterior.

Constant SGD, Langevin dynamics, normal distributions of the params (IVON, SWAG), and diagnostics of
draws. See ``examples/constant_sgd_posterior.py``.
"""
