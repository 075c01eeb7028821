"""What a step of layer sampling will cost in memory and arithmetic."""
