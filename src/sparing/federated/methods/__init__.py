"""What clients and server do, method by method."""
