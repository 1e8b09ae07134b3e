"""What each row of the batch carries on the device."""
