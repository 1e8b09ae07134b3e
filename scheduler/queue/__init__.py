"""Which request goes next."""
