"""Observes a FineTuneJob: its children in the cache of the watches, and its state in MLflow, Databricks, Kueue and Git."""
