"""Model registries: one interface, and one writer of aliases."""
