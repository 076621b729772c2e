"""A training run, from arguments to report: the parts of the loop in recipes/train_gpt2_slt.py."""
