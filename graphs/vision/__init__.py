"""The vision tower of Idefics3 and SmolVLM."""
