"""Parts of `xla-engine simulate`."""
