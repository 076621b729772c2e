"""Supermask models of transformers: configuration, what all models can do, the classes of each architecture."""
