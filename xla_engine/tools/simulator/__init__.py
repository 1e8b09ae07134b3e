"""Runs the scheduler on a simulated clock, without a device, to predict the times of a run."""
