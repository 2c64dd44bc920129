"""Sharded checkpoints: `checkpointer` saves and loads, `newest` finds, `folder` publishes with a marker, `shards` writes DCP files."""
