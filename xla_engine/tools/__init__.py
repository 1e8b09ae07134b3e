"""Programs about the engine: its benchmark, its simulator, soak tests, and runs drawn as pictures."""
