"""Registered models, wherever they are: one interface, and one writer of their aliases."""
