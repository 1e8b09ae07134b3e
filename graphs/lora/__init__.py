"""LoRA adapters: their matrices, and products with them."""
