"""Tickets in programs that are not Python: llama.cpp and a browser tab.

Knows the files of a ticket (`hf_slt.model`) and its other forms (`hf_slt.sharing`), not how one is trained.
"""
