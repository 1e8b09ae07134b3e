"""`xla-engine bench`: this engine and its peers take turns on the same weights, prompts and threads.

The driver touches no device: every engine, this one too, runs in a process of its own.
"""
