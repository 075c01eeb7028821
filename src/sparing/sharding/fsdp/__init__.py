"""The plans on PyTorch's own engine: ``fully_shard`` gathers and frees, our rings carry, plans stay data."""
