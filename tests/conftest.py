"""Puts this folder on the path, so that every test can import the hand-made plans in it."""
