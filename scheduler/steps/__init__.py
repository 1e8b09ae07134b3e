"""The contents of a step, prompt chunks and rows, and the crediting of its tokens."""
