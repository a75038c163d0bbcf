"""Plan to files: stage modules, the plan folder, and pictures of it."""
