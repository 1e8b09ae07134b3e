"""Live requests: validation, sequences, tokens, text and outputs."""
