"""Pooling: starting its program and fetching its results."""
