"""Pruning and freezing.

A mask for each single weight. See ``examples/prune_freeze_sweep.py``.
"""
