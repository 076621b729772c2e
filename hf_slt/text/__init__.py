"""Text in, blocks of token ids out; and how well a model predicts a text.

Knows nothing of supermasks: any causal language model of transformers can be evaluated here.
"""
