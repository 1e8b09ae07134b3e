"""Proposers on the device, which draft inside the verify step: draft models and draft heads."""
