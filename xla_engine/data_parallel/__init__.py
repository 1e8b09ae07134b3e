"""Data parallelism: several engines on one machine, each in its own process, behind one interface."""
