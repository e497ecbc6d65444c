"""Turn a source of examples into model-ready batches."""
