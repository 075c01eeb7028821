"""Whether models will merge, predicted before merging."""
