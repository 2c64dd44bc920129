"""Databricks workspaces."""
