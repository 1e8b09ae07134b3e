"""Row-wise operations that layers and sampler share."""
