"""Rules turn scores into masks; masked parameters put them into the modules of any torch model.

Needs torch, but no model of transformers.
"""
