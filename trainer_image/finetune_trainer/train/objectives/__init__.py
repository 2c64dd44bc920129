"""What the loss is, one file an objective; `network.Objective` is what they have in common."""
