"""A soak: an engine under everything that callers and devices do, and what must hold."""
