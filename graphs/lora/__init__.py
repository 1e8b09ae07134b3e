"""Low-rank adapters: what they add to the products of a layer."""
