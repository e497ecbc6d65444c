"""Load, align, patch and merge checkpoints, and find their transformer blocks."""
