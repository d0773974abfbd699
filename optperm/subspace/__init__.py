"""Training in the subspace that a training trajectory spans."""
