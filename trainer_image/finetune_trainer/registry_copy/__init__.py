"""Copies a version from one MLflow registry to another: `finetune-copy`."""
