"""What can be seen of an engine: counters, distributions, timers, metrics, step logs and status files."""
