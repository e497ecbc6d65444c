"""Checkpoints loaded, aligned, patched and merged; their blocks found."""
