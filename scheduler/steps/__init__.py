"""What one step holds: prompt chunks, decoding rows, and the credit of their tokens."""
