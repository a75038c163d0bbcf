"""The discrete-event simulator of one virtual worker."""
