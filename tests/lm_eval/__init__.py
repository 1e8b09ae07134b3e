"""lm-evaluation-harness on this engine."""
