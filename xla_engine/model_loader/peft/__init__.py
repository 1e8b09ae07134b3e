"""LoRA adapters in PEFT's format, and `LoRARequest`."""
