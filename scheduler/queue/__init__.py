"""The waiting queue, deadlines, and round-robin quanta."""
