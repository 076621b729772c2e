"""The file of a ticket: its header, its checks, reading, writing, coding. NumPy and safetensors, no torch."""
