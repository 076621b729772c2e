"""Tickets in programs that are not Python: llama.cpp and a browser tab.

May use `model` and `sharing`: what is written here follows from the files of a ticket.
"""
