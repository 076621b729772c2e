"""What another person or program gets of a ticket: the Hub, card and figures, masks compared and combined.

Knows the files of a ticket (`hf_slt.tickets`), not how one is trained. No torch.
"""
