"""The modes of `xla-engine run`: a batch from file to file, a stream over pipes, a prompt, or a dry run."""
