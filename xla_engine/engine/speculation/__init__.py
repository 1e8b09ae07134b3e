"""Drafts for a step to verify: who proposes them, and how many tokens a step checks."""
