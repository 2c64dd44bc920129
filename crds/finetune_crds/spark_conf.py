"""The Spark settings that a job can set: they tune its execution and its access to stores.

Settings that load other code, or that change what the operator configures, are refused.
"""

from __future__ import annotations

import re

from finetune_crds.base import Rule

ALLOWED = (
    "spark[.]sql[.](adaptive|files|json|csv|parquet|orc|optimizer|execution[.]arrow)[.].+",
    "spark[.]sql[.](shuffle[.]partitions|autoBroadcastJoinThreshold|broadcastTimeout|caseSensitive|session[.]timeZone)",
    "spark[.]databricks[.]delta[.].+",
    "spark[.](shuffle|memory|network|rpc|task|speculation|locality|reducer|dynamicAllocation|eventLog)[.].+",
    "spark[.](speculation|default[.]parallelism|log[.]level|driver[.]maxResultSize|io[.]compression[.].+)",
    "spark[.](driver|executor)[.](memoryOverhead|memoryOverheadFactor)",
    "spark[.]executor[.](heartbeatInterval|pyspark[.]memory)",
    "spark[.]kubernetes[.]executor[.]limit[.]cores",
    "spark[.]ui[.](enabled|port|showConsoleProgress)",
    "spark[.]hadoop[.]fs[.](s3a|gs|azure)[.].+",
)
"""Regular expressions that match the whole name of a setting."""
_ALLOWED_NAME = re.compile("|".join(ALLOWED))
_ALLOWED_SETTINGS = (
    "settings of execution (spark.sql.adaptive, spark.sql.shuffle, spark.sql.files, spark.memory, spark.shuffle, spark.network, "
    "spark.databricks.delta and the like) and of stores (spark.hadoop.fs.s3a, fs.gs, fs.azure)"
)


def refusal(conf: dict[str, str]) -> str | None:
    """Return an error that names the settings that a job must not set; None if all settings are allowed."""
    names = [name for name in conf if not _ALLOWED_NAME.fullmatch(name)]
    return f"conf must not set {', '.join(names)}: it accepts {_ALLOWED_SETTINGS}" if names else None


def rule() -> Rule:
    """Return the rule of the settings, for the object that has them as `conf`."""
    pattern = f"^({'|'.join(ALLOWED)})$"
    return Rule(
        f"!has(self.conf) || self.conf.all(name, name.matches('{pattern}'))",
        f"conf accepts only {_ALLOWED_SETTINGS}",
        ".conf",
    )
