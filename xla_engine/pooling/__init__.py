"""Vectors, classes and scores of texts: what is asked for, how a model makes them, and what comes back."""
