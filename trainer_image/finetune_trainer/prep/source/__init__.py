"""Reads the raw corpus: files, tables and datasets of the Hub."""
