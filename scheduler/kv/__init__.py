"""Device memory: slots, KV blocks, prefix caching and preemption."""
