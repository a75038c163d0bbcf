"""The compiler's passes: one idea a file, each with a test of the same name."""
