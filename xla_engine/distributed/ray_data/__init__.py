"""A stage of Ray Data."""
