"""Optimizers, their schedule, decay and loss scale."""
