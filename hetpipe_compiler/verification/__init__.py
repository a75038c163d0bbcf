"""Does a written plan compute what the user's model computes? Numbers decide: see `verify`."""
