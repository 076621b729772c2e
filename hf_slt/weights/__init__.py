"""Weights from a seed: random numbers, the codes of masks, and quantised numbers. Needs only NumPy."""
