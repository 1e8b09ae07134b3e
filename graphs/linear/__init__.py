"""Linear layers: the one home of every product with weights."""
