"""The peers' workers, each run by the interpreter of its peer. Wheels do not contain them."""
