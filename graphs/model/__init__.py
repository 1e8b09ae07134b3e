"""The decoder as flax modules, and the arrays it consists of."""
