"""Plans: one entry per weight, with its factors, bytes and file format."""
