"""Wheels with the C++ operations inside, compiled for every instruction set of their platform."""
