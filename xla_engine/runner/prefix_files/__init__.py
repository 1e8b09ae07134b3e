"""KV blocks of shared prefixes in files, for later starts and other processes: `EngineConfig.prefix_cache_dir`."""
