"""Stochastic gradients as samples of a posterior."""
