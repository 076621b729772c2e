"""A seed is the weights: random numbers, the codes of masks, short numbers. NumPy only."""
