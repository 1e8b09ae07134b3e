"""Programs that measure, simulate and test the engine, and draw its runs."""
