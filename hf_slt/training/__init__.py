"""What only learning needs: layers with scores, selection of masks, the loop from blocks to a report.

Nothing here travels with a ticket.
"""
