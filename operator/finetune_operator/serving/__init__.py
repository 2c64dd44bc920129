"""Serving endpoints, as they are and as they are to be."""
