"""Gated DeltaNet layers, which have a recurrent state instead of keys and values."""
