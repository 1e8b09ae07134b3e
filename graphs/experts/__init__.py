"""Mixture-of-experts layers: routing and products."""
