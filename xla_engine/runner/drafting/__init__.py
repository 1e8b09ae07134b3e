"""What proposes drafts on the device, inside the verify step: models that run next to the engine's own."""
