"""Speculative decoding: proposers of drafts, and the choice of how many tokens a step verifies."""
