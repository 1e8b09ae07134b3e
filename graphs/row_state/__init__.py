"""The state of each row on the device."""
