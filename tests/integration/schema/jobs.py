"""Parts of FineTuneJobs that several tables of cases share."""

from __future__ import annotations

from typing import Any

from fixtures.operator_processes.jobs import job

Json = dict[str, Any]
PREFERENCES: Json = {"type": "Preference", "prompt": "p", "chosen": "c", "rejected": "r"}
UNPAIRED: Json = {"type": "Unpaired", "label": "thumb"}
KTO: Json = {"type": "KTO"}
DPO: Json = {"type": "DPO"}
NO_PACKS: Json = {"packing": False}
UNITY: Json = {"type": "UnityCatalog", "unityCatalog": {"uri": "http://unity:8080"}}
AT_DATABRICKS: Json = {"uri": "databricks", "registryUri": "databricks-uc"}
MODEL: Json = {"model": "main.llm.support"}
IN_DBFS = "or an absolute path on a volume; pods cannot reach DBFS"
NO_LOGIN = "data.splits.type Tables, and a folder in /Volumes as output.uri, checkpoint.uri or checkpoint.resumeFrom.uri, require the Databricks login of spec.tracking: set tracking.uri to databricks"


def prepared(columns: Json | None = None, **fields: Any) -> Json:
    """spec.data with fields of prepare replaced."""
    return {
        "source": {"type": "Parquet", "path": "/data/corpus"},
        "columns": columns or {"type": "Text"},
        "prepare": {"output": "/data/splits", **fields},
    }


def registered(**parts: Any) -> Json:
    """A job that registers in Unity Catalog."""
    return job(**({"tracking": AT_DATABRICKS, "register": MODEL} | parts))


def databricks_run(
    databricks: Json | None = None,
    *,
    spark: Json | None = None,
    source: Json | None = None,
    base: str = "org/model",
    pods: Json | None = None,
    **prepare: Any,
) -> Json:
    """A job whose preparation is a Databricks run; parts of it replaced."""
    databricks_part = {"volume": "/Volumes/main/llm/work", **(databricks or {})}
    data = {
        "source": source or {"type": "Delta", "table": "main.llm.chats"},
        "prepare": {
            "output": "s3://lake/splits",
            "spark": {"mode": "Databricks", "databricks": databricks_part, **(spark or {})},
            **prepare,
        },
    }
    parts: Json = {"pods": pods} if pods else {}
    return job(data=data, model={"base": base}, **parts)
