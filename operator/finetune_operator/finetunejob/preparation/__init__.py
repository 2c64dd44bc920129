"""The preparation of a job's data, and where Spark runs it."""
