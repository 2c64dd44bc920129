"""Tasks of every pod of a job: report its exit, follow the MLflow run, and check out code."""
