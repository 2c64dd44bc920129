"""The Spark settings that a job can set: they tune its execution and its access to stores.

Settings that load other code, or that change what the operator configures, are refused.
"""

from __future__ import annotations

import re

from finetune_crds.base import Rule

ALLOWED = (
    "sql[.](adaptive|files|json|csv|parquet|orc|optimizer|execution[.]arrow)[.].+",
    "sql[.](shuffle[.]partitions|autoBroadcastJoinThreshold|broadcastTimeout|caseSensitive|session[.]timeZone)",
    "databricks[.]delta[.].+",
    "(shuffle|memory|network|rpc|task|speculation|locality|reducer|dynamicAllocation|eventLog)[.].+",
    "(speculation|default[.]parallelism|log[.]level|driver[.]maxResultSize|io[.]compression[.].+)",
    "(driver|executor)[.](memoryOverhead|memoryOverheadFactor)",
    "executor[.](heartbeatInterval|pyspark[.]memory)",
    "kubernetes[.]executor[.]limit[.]cores",
    "ui[.](enabled|port|showConsoleProgress)",
    "hadoop[.]fs[.](s3a|gs|azure)[.].+",
)
"""Regular expressions that match the name of a setting after `spark.`."""
_PATTERN = f"spark[.]({'|'.join(ALLOWED)})"
_ALLOWED_NAME = re.compile(_PATTERN)
_ALLOWED_SETTINGS = "settings of execution (such as spark.sql.adaptive, spark.sql.shuffle or spark.memory) and of stores (spark.hadoop.fs)"


def refusal(conf: dict[str, str]) -> str | None:
    """Return an error that names the settings that a job must not set; None if all settings are allowed."""
    names = [name for name in conf if not _ALLOWED_NAME.fullmatch(name)]
    return f"conf must not set {', '.join(names)}: it accepts {_ALLOWED_SETTINGS}" if names else None


def rule() -> Rule:
    """Return the rule of the settings, for the object that has them as `conf`."""
    return Rule(
        f"!has(self.conf) || self.conf.all(name, name.matches('^{_PATTERN}$'))",
        f"conf accepts only {_ALLOWED_SETTINGS}",
        ".conf",
    )
