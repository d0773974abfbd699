"""Training in small subspaces.

DLDR and its two phases. See ``examples/dldr_digits.py``.
"""
