"""The partition search's hot loops, compiled by numba, and the arrays that they read. Kernels here call each other."""
