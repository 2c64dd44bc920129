"""A real API server, a real MLflow server, and the operator as a process."""
