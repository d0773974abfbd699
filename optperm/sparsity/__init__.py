"""Pruning, freezing and sparse training, with a mask for each weight.

See ``examples/prune_freeze_sweep.py``.
"""
