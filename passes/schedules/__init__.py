"""One schedule a file."""
