"""`spec.data.prepare.spark.databricks`: a preparation that runs as a Databricks run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from finetune_crds.base import ApiModel, EnvMap, Name, NonNegative, Rule, rules, value_or_empty
from finetune_crds.env import LocalReference

SECRET_KEYS = ("DATABRICKS_HOST", "DATABRICKS_TOKEN", "DATABRICKS_CLIENT_ID", "DATABRICKS_CLIENT_SECRET")
"""Keys of a Secret with the login of a workspace."""
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
"""CEL method call on a path: whether the path is in a Databricks workspace."""
ON_DATABRICKS = (
    "(has(self.tracking.uri) && self.tracking.uri == 'databricks' || "
    "has(self.tracking.registryUri) && self.tracking.registryUri == 'databricks-uc')"
)
"""CEL expression on the spec of a job: whether the job's MLflow run or registered model is at Databricks."""


LOGIN_RULE = Rule(
    "(!has(self.data) || !has(self.data.splits) || self.data.splits.type != 'Tables') && "
    f"[has(self.output) ? self.output.uri : '', has(self.checkpoint) && {value_or_empty('self.checkpoint.uri')}, "
    f"has(self.checkpoint) && has(self.checkpoint.resumeFrom) && {value_or_empty('self.checkpoint.resumeFrom.uri')}].all(uri, !uri.startsWith('/Volumes/')) || {ON_DATABRICKS}",
    "data.splits.type Tables, and a folder in /Volumes as output.uri, checkpoint.uri or checkpoint.resumeFrom.uri, require the Databricks "
    "login of spec.tracking: set tracking.uri to databricks, or use object storage",
)
"""A rule of FineTuneJobSpec: the training pods access tables and volumes of Unity Catalog with the login of the workspace."""


class Serverless(ApiModel):
    """Serverless compute."""

    environment_version: Annotated[str, Field(max_length=8, pattern=r"^[0-9]+$")] = "4"
    """Version of the serverless environment, 4 or later. It determines the version of Python."""


class ExistingCluster(ApiModel):
    """An existing cluster."""

    cluster_id: Name
    """Id of the cluster, such as 1118-101010-abcdefgh; `filter` requires access mode Dedicated."""


class NewCluster(ApiModel):
    """A cluster for this run alone, with access mode Dedicated."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.nodeType) != has(self.instancePoolId)",
                "set exactly one of nodeType and instancePoolId",
            ),
        )
    )

    spark_version: Name
    """Version of Databricks Runtime, 17.3 or later, such as 17.3.x-scala2.13."""
    node_type: Name | None = None
    """Machine type of driver and workers, such as i3.xlarge."""
    instance_pool_id: Name | None = None
    """Instance pool for driver and workers."""
    policy_id: Name | None = None
    """Cluster policy, whose defaults apply."""
    workers: NonNegative = 2
    """Number of workers. 0: a single-node cluster."""
    env: EnvMap = Field(default_factory=dict)
    """Environment variables of driver and workers, such as HF_TOKEN: "{{secrets/scope/key}}". Databricks reads a secret
    scope with the identity of secretRef."""


class Compute(ApiModel):
    """The compute of a Databricks run."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            (
                "has(self.existingCluster) == (self.type == 'ExistingCluster') && has(self.newCluster) == (self.type == 'NewCluster') && "
                "(!has(self.serverless) || self.type == 'Serverless')",
                "type ExistingCluster requires existingCluster, type NewCluster requires newCluster, and type Serverless allows serverless: "
                "set no other of these fields",
            ),
        )
    )

    type: ComputeType
    """Serverless compute, without Spark settings and `filter` (Serverless), a cluster by its id (ExistingCluster), or a
    new cluster (NewCluster)."""
    serverless: Serverless | None = None
    """Settings of serverless compute."""
    existing_cluster: ExistingCluster | None = None
    """The existing cluster."""
    new_cluster: NewCluster | None = None
    """The new cluster."""


class Databricks(ApiModel):
    """A preparation as a Databricks run. The identity of the run reads the source and writes the output through Unity Catalog."""

    volume: Volume
    """Folder for the recipe, the operator's wheel and the result of the run: /Volumes/catalog/schema/volume, or a folder in
    it. Each version of the operator uploads its wheel once."""
    compute: Compute = Field(default_factory=lambda: Compute(type="Serverless"))
    """Compute of the run. Default: Serverless."""
    secret_ref: LocalReference | None = None
    """Secret with the login of a Databricks workspace, see tracking.secretRef. Default: tracking.secretRef if MLflow is
    at Databricks; otherwise databricks.host of the chart."""
