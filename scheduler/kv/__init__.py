"""What requests hold on the device: slots, blocks and prefixes."""
