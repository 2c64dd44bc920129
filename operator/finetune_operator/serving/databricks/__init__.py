"""Endpoints of Databricks Model Serving."""
