"""Sharded checkpoints: `checkpointer` saves and loads, `folder` publishes with a marker, `shards` writes DCP files."""
