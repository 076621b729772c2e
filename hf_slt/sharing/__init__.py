"""Sharing tickets: the Hub, the card, figures, and comparing and combining masks.

Uses the files of a ticket (`hf_slt.tickets`), but nothing of training. Does not need torch.
"""
