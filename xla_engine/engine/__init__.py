"""One model, its scheduler and its runner, driven turn by turn."""
