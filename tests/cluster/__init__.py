"""A real Kubernetes on this machine, for the tests: no registry, no Docker engine, one command."""
