"""`xla-engine bench`: this engine and its peers on the same weights, prompts and threads, in turns.

The driver touches no device: every engine, ours as well, runs in a process of its own.
"""
