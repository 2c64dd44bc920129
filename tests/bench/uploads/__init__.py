"""How a model gets to the store of an MLflow server: through the server, or straight."""
