"""From model.py to one captured fx graph."""
