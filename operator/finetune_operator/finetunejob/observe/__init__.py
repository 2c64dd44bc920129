"""What exists of a FineTuneJob: its children from the cache of the watches, and what MLflow, Databricks, Kueue and Git report."""
