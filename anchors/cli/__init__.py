"""What the command line reads and prints."""
