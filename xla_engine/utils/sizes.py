"""Numbers of bytes as people read them."""


def size(count: int) -> str:
    """Format bytes in decimal units with three digits: `1.23 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 999.5:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} TB"
