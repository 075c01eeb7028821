"""Language models and their text, for every job that reads one: folders, records, labels, packed rows, losses."""
