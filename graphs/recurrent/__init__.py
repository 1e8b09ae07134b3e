"""Recurrent layers, which have a state instead of keys and values."""
