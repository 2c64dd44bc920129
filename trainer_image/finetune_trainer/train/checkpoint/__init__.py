"""Sharded checkpoints: `checkpointer` saves and loads, `folder` publishes by a marker, `shards` are DCP's files."""
