"""Who guesses on the device, inside the verify step: models that run beside the engine's own."""
