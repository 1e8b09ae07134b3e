"""Commands about the same bits: `verify`, `replay`, `shrink`, `compare`."""
