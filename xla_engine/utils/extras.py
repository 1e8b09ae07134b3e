"""How to install an extra."""


def install(extra: str) -> str:
    """The command that installs an extra from a checkout, because xla-engine is not on a package index."""
    return f"pip install '.[{extra}]' in the checkout of xla-engine"
