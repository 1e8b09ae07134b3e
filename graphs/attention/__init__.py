"""Attention over the KV cache: one contract, a backend for each platform."""
