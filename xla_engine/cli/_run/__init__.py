"""What `xla-engine run` does: a batch from file to file, a stream over pipes, or a check of every line."""
