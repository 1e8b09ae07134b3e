"""Split one input over independent jobs, and merge their outputs."""
