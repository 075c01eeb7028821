"""What a plan costs and which one fits: traffic, memory, time."""
