"""Plan folder to training."""
