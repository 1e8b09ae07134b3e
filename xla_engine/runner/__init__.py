"""The only folder that touches devices: compiled programs, device state and what fits in memory."""
