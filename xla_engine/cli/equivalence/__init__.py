"""Commands that check equivalence: `verify`, `replay`, `shrink`, `compare`."""
