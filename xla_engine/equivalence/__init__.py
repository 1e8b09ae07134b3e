"""The promise, checked: the same bits alone and in a batch."""
