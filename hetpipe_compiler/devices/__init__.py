"""Catalogue of GPU kinds and links."""
