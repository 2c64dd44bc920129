"""A decision in the making, and what policies use to write it."""
