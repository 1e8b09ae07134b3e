"""What of an engine's weights its callers change: adapters, and the weights themselves."""
