"""Local steps on many devices, and rare commits over collectives."""
