"""The operator's own parts on an API server and registries in memory, and what must hold whatever happens to them."""
