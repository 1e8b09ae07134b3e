"""Soak tests: engines under every kind of request and fault, and the properties that must hold."""
