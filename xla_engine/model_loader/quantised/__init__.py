"""Quantised safetensors checkpoints: what config.json calls `quantization_config`, a module for each method."""
