"""A source of examples → model-ready batches."""
