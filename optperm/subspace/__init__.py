"""Training in small subspaces.

DLDR with its second phases, P-BFGS, P-SGD and TWA (see ``examples/dldr_digits.py``), and optimizers with
low-rank states.
"""
