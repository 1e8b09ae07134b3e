# Frozen: runs at commit 590d0eb.
"""What spikes share: timing in turns, tables, and the GPU spike in parts."""
