"""Requests and control lines in, interleaved events out."""
