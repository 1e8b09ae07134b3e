"""The decoder: layers, weights and one forward pass."""
