"""A release: images and chart in a registry, and a folder with what people install from."""
