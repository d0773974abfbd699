"""Internal code that all methods share."""
