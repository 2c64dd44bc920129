"""Servers of Git."""
