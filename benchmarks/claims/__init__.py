"""Claims of the five papers, each beside what was measured here; numbers come from tables made of committed JSON."""
