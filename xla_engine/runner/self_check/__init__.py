"""The start-up self-check: whether a request gets the same bits in every row and every program on this machine."""
