"""The KV cache of all slots: make it, copy and move its parts. Attention backends write keys and values into it."""
