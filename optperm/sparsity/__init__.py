"""Weights that stay where they are: masks for each element, pruning and freezing."""
