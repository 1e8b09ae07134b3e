"""The scheduler on a clock of its own: what a run would take, without a device."""
