"""Checks of the values of options and of sampling parameters."""
