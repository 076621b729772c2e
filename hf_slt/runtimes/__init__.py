"""Tickets in programs that are not Python: llama.cpp and a browser tab.

Uses the files of a ticket (`hf_slt.tickets`) and the models (`hf_slt.models`), but nothing of training.
"""
