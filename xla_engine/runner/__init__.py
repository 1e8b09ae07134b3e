"""The device side: compiled programs, device state and memory planning. The only folder that touches devices."""
