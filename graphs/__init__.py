"""What the device runs: arrays in, arrays out. No files, clocks, logs, environment or requests."""
