"""Trackers besides MLflow: TensorBoard and W&B.

Each sink is a process of its own, which gets entries through a pipe. So a client that blocks, crashes or does not end never delays
training, and the ranks import neither client.
"""
