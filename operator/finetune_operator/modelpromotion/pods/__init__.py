"""The Jobs of a promotion, with one pod at a time: of a gate, and of a copy."""
