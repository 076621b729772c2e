"""Tickets in programs that are not Python: llama.cpp and a browser tab.

Knows the files of a ticket (`hf_slt.tickets`) and the model (`hf_slt.models`), not how one is trained.
"""
