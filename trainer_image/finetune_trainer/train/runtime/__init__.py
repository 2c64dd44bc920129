"""The basis of every step of the pipeline: the recipe, the ranks, signals, storage, and MLflow tracking."""
