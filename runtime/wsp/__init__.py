"""Wave Synchronous Parallel: the parameter server's rule and the worker's side of it."""
