"""vLLM's names and shapes."""
