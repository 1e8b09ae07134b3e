"""The KV cache of all slots: making, copying, reading and writing it."""
