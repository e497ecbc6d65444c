"""Measure the accuracy of models: evaluation protocols, and scores with their confidence intervals."""
