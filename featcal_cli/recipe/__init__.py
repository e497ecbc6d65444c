"""Read a YAML recipe and command-line options into one validated object."""
