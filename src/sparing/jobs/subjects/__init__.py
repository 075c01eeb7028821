"""What scans and merges look at: finished models of folders and entry points, and rows to measure them on."""
