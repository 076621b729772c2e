"""Supermask models of transformers: configurations, the common methods, and the classes of each architecture."""
