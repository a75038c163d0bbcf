"""How values travel between the stages of one virtual worker."""
