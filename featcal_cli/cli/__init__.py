"""Commands, options and terminal output; the only package that imports typer and rich."""
