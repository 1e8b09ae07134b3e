"""`xla-engine bench`: this engine and its peers take turns on the same weights, prompts and threads.

The driver uses no device: every engine, including this one, runs in its own process.
"""
