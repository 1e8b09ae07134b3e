"""What of the weights on the device may change while an engine runs."""
