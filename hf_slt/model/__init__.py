"""What travels with a ticket: it draws the weights, reads and checks the masks, and computes.

`save_pretrained` copies these files beside every ticket, for `trust_remote_code`. They are therefore flat,
import only each other, torch, transformers, safetensors and numpy, and are short enough to be read before
they are trusted. What only training, sharing or a study needs lives in another room.
"""
