"""The report of a preparation."""
