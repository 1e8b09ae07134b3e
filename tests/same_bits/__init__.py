"""`xla_engine.same_bits`."""
