"""What a run leaves for people to look at: step logs and status files."""
