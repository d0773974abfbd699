"""Pruning, freezing and sparse training.

Each weight has its own entry in a mask. See ``examples/prune_freeze_sweep.py``.
"""
