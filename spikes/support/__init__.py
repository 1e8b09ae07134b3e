"""What spikes share: timing in turns, tables, and the GPU spike in parts."""
