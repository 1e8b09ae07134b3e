"""Who guesses the tokens that a verify step checks."""
