"""The weights on the device, which may change while an engine runs."""
