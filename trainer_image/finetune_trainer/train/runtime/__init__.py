"""What every step of the pipeline stands on: the recipe, the ranks, signals, storage, and MLflow tracking."""
