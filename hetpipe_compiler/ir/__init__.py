"""The data that passes hand on. Each type has a text form that round-trips."""
