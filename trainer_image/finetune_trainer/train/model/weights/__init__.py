"""Weights of a model: read, filled into shards, merged and written."""
