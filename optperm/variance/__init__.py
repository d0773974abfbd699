"""Gradients with less variance than those of a batch."""
