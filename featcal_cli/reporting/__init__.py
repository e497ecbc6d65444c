"""Schemas of results, the model card, pictures, the HTML page, limits of drift."""
