"""Several engines on one machine behind one, a process each."""
