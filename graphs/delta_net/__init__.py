"""Gated DeltaNet layers: recurrent state in place of keys and values."""
