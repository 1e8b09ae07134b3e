"""Find a model by its name, and load its configuration and weights."""
