"""Turns text into blocks of token ids, and measures how well a model predicts a text.

Nothing here depends on supermasks: any causal language model of transformers can be evaluated.
"""
