"""Linear layers: every product with weights."""
