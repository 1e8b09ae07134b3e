"""Batch runs: lines of JSON in, lines of JSON out."""
