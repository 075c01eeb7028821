"""Steps inside each group without traffic between groups, and an outer step on what the groups have moved by."""
