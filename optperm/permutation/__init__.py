"""Training by permutation: SGPerm."""
