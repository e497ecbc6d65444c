"""A YAML file and options → one validated object."""
