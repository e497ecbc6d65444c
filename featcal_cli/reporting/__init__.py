"""Schemas of results, the model card, pictures, the HTML page, and limits of drift."""
