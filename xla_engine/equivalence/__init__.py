"""Check the promise of equivalence: a request gets the same bits alone and in a batch."""
