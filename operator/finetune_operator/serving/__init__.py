"""Serving endpoints: their state, and changes to them."""
