"""Rules turn scores into masks; masked parameters put them into the modules of any torch model.

Knows torch, and no transformers model.
"""
