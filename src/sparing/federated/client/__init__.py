"""The client's round: local steps and how its rows are drawn."""
