"""Constant SGD as approximate Bayesian inference."""
