"""Servers that stand in for systems that tests cannot run."""
