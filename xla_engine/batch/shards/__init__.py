"""Independent jobs over one input, and their outputs made into one."""
