"""Measure on the machine at hand: operators, links, and how much of its peaks a device reaches."""
