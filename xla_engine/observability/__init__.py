"""Observe an engine: counters, distributions, timers, metrics, step logs and status files."""
