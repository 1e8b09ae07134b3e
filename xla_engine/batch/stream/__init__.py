"""`run --stream`: reads requests and control lines, writes interleaved events."""
