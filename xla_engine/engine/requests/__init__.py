"""Live requests: their sequences, what they have so far, and what may be asked of them."""
