"""Training in small subspaces.

DLDR, its first phase, and what trains in the subspace: BFGS, P-SGD and TWA. See
``examples/dldr_digits.py``.
"""
