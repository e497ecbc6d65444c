"""Repos at a commit: listed, downloaded, converted, written to."""
