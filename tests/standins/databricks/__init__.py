"""A stand-in Databricks workspace: an HTTP server on loopback that the real databricks-sdk talks to.

Requests are read and answers written with the SDK's own classes, so that it cannot drift from them. It has the login of
a workspace (tokens, client credentials, token exchange), serving endpoints, models in Unity Catalog, files, MLflow's runs, which
MLflow's own server keeps, and one-time runs of jobs, whose wheel it runs for real.
"""

from standins.databricks.server import running
from standins.databricks.state import Fault, Workspace
from standins.databricks.unity import Refusal

__all__ = ["Fault", "Refusal", "Workspace", "running"]
