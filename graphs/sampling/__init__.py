"""Sampling: from logits to a token and its log-probabilities."""
