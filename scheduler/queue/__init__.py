"""Which request goes next, and which has had its time."""
