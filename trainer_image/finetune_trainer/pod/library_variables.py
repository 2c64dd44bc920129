"""The environment variables that configure the libraries of a pod. A process adds them before its first thread starts.

NB: to add a variable, the C library may move the environment, while native code of another thread, such as the resolver or the object store
of deltalake, reads it: the process then ends with SIGSEGV (glibc 2.36, setenv(3): MT-Unsafe env). To replace the value of a variable moves
nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping

HTTP_TIMEOUT = "MLFLOW_HTTP_REQUEST_TIMEOUT"
"""The variable with the seconds after which a request of MLflow's client fails."""
_DEFAULTS = {
    # MLflow's client fails fast and does not retry.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
    HTTP_TIMEOUT: "30",
    # In a Databricks workspace, the client by default retries for ten minutes, whatever the number of retries.
    "MLFLOW_DATABRICKS_ENDPOINT_HTTP_RETRY_TIMEOUT": "60",
    # A bar for each file would fill the log of the pod.
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # Otherwise gcsfs asks another API, by gRPC, for the kind of each bucket.
    "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
}


def set_compiler_defaults(local_rank: int) -> None:
    """Add the variables that torch's compiler would add when it compiles the first layer, beside other threads."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor"
    _add(
        {
            "TORCHINDUCTOR_CACHE_DIR": folder,
            # As in torch: a folder for each device.
            "TRITON_CACHE_DIR": f"{folder}/triton/{local_rank}",
            # The compiler replaces the value by an address of this process.
            "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR": "0",
        }
    )


def set_defaults(**variables: str) -> None:
    """Add the variables that the environment lacks: `variables`, and those that each process of a pod needs. No thread runs yet."""
    _add(_DEFAULTS | variables)


def _add(variables: Mapping[str, str]) -> None:
    """Add the variables that the environment lacks."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)
