"""The library of C++ operations, built with the compiler of this machine for the instruction set that is asked for."""
