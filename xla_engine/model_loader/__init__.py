"""From the name of a model to its configuration and weights."""
