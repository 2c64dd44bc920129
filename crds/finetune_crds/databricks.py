"""`spec.data.prepare.spark.databricks`: a preparation that runs as a Databricks run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, EnvMap, Name, NonNegative, Rule, rules
from finetune_crds.env import LocalReference

SECRET_KEYS = ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
"""Keys of the Secret of a workspace."""
ComputeType = Literal["Serverless", "ExistingCluster", "NewCluster"]
Volume = Annotated[
    str,
    Field(
        min_length=1,
        max_length=1024,
        json_schema_extra=rules(
            (
                "self.matches('^/Volumes/[^/ ]+/[^/ ]+/[^/ ]+(/[^/ ]+)*$')",
                "volume must be /Volumes/catalog/schema/volume, or a folder in it",
            )
        ),
    ),
]
"""A volume of Unity Catalog, or a folder in one."""
IN_WORKSPACE = "matches('^(/Volumes/|dbfs:/|/dbfs/)')"
"""Whether a path is one of a workspace, as a call on it in an expression."""
ON_DATABRICKS = (
    "(has(self.tracking.uri) && self.tracking.uri == 'databricks' || "
    "has(self.tracking.registryUri) && self.tracking.registryUri == 'databricks-uc')"
)
"""Whether the tracking of a job is at Databricks, as an expression on its spec."""


def build_workspace_folder_rules(field: str) -> tuple[Rule, Rule]:
    """Rules of a folder of the training pods that a Databricks workspace may hold: in a volume, with the login to it, and not in DBFS.

    Args:
        field: of the spec, as a path without the first dot.
    """
    names = field.split(".")
    unset = " || ".join(f"!has(self.{'.'.join(names[:end])})" for end in range(1, len(names) + 1))
    return (
        Rule(
            f"{unset} || !self.{field}.matches('^(dbfs:/|/dbfs/)')",
            "the training pods cannot reach DBFS: use a volume of Unity Catalog, or object storage",
            f".{field}",
        ),
        Rule(
            f"{unset} || !self.{field}.startsWith('/Volumes/') || {ON_DATABRICKS}",
            "a folder in /Volumes requires the Databricks login of spec.tracking: set tracking.uri to databricks, or use the "
            "object storage behind the volume",
            f".{field}",
        ),
    )


class Serverless(ApiModel):
    """Serverless compute."""

    environment_version: Annotated[str, Field(max_length=8, pattern=r"^[0-9]+$")] = "4"
    """Databricks's version of the environment, which has its version of Python. 4 or later."""


class ExistingCluster(ApiModel):
    """A cluster that exists."""

    cluster_id: Name
    """Its id, such as 1118-101010-abcdefgh. Its access mode must be Dedicated for `filter`."""


class NewCluster(ApiModel):
    """A cluster for this run alone. Its access mode is Dedicated."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.nodeType) != has(self.instancePoolId)",
                "set exactly one of nodeType and instancePoolId",
            ),
        )
    )

    spark_version: Name
    """Version of Databricks Runtime, such as 17.3.x-scala2.13. 17.3 or later."""
    node_type: Name | None = None
    """Machine of driver and workers, such as i3.xlarge."""
    instance_pool_id: Name | None = None
    """Pool that driver and workers are taken from."""
    policy_id: Name | None = None
    """Cluster policy, whose defaults count too."""
    workers: NonNegative = 2
    """Number of workers. 0: a driver that works alone."""
    env: EnvMap = Field(default_factory=dict)
    """Environment variables of driver and workers, such as HF_TOKEN: "{{secrets/scope/key}}", which Databricks reads from a
    secret scope as the identity of secretRef."""


class Compute(ApiModel):
    """What a Databricks run runs on."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "self.type == 'ExistingCluster' ? has(self.existingCluster) : !has(self.existingCluster)",
                "existingCluster is required when type is ExistingCluster, and forbidden otherwise",
                ".existingCluster",
            ),
            (
                "self.type == 'NewCluster' ? has(self.newCluster) : !has(self.newCluster)",
                "newCluster is required when type is NewCluster, and forbidden otherwise",
                ".newCluster",
            ),
            (
                "self.type == 'Serverless' || !has(self.serverless)",
                "serverless can be set only when type is Serverless",
                ".serverless",
            ),
        )
    )

    type: ComputeType
    """Serverless: no cluster to name; Spark's settings and `filter` are not available. ExistingCluster: by its id. NewCluster: made
    for the run and deleted after it."""
    serverless: Serverless | None = None
    """Settings of serverless compute."""
    existing_cluster: ExistingCluster | None = None
    """The cluster to use."""
    new_cluster: NewCluster | None = None
    """The cluster to make."""


class Databricks(ApiModel):
    """A preparation as a Databricks run. The run's identity reads the source and writes the output through Unity Catalog."""

    volume: Volume
    """Where the operator puts its wheel and the recipe, and the run its result: /Volumes/catalog/schema/volume, or a folder in
    it. The wheel is uploaded once for each version of the operator."""
    compute: Compute = Field(default_factory=lambda: Compute(type="Serverless"))
    """What the run runs on. Default: Serverless."""
    secret_ref: LocalReference | None = None
    """Secret with DATABRICKS_HOST and DATABRICKS_TOKEN, or DATABRICKS_CLIENT_ID and DATABRICKS_CLIENT_SECRET. Default: the Secret of
    tracking.secretRef if the run is tracked at Databricks, else the workspace that the operator is installed with."""
