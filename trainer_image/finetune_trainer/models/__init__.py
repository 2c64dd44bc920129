"""Reads models by their URI, caches them between jobs, and writes them."""
