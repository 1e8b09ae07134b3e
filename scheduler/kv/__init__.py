"""What requests hold on the device, who loses it, and what they leave there: slots, blocks, prefixes."""
