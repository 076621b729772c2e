"""A run, from arguments to report: the pieces of the loop in recipes/train_gpt2_slt.py."""
