"""Checks of a network before its first step."""
