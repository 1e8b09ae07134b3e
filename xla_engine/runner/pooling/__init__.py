"""Vectors of prompts: the program that pools them, started and read."""
