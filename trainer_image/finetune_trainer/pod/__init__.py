"""What every pod of a job does: it reports its exit, follows the MLflow run, and checks out code."""
