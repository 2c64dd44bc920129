"""The network that is trained: its layers, attention, output layer and loss."""
