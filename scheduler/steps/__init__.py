"""What one step holds: prompt chunks and decoding rows, and which requests their tokens belong to."""
