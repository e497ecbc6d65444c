"""Commands, options, and what the terminal shows. The only place that imports typer and rich."""
