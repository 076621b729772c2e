"""The file of a ticket: header, checks, reading, writing, coding. Needs NumPy and safetensors, not torch."""
