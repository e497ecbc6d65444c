"""Accuracy: protocols, and scores with their intervals."""
