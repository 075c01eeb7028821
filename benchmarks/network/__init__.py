"""All plans, and the rivals, on a network whose links are held to given rates; ``sweep`` is the command."""
