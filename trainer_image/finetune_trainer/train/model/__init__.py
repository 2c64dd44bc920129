"""The sharded network: `load` and `adapt` the base, `shard` it within `memory`, run it as a `network`."""
