"""Whatever happens to a job, in whatever order: the promises that hold at every step."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from hypothesis import strategies as st

from finetune_crds.conditions import Condition, ConditionReason, ConditionType
from finetune_crds.contract import (
    TAG_CHECKPOINT_ERROR,
    TAG_EVALUATION_DATA,
    PodError,
    PrepResult,
    TerminationMessage,
    TrainResult,
)
from finetune_crds.evaluation import EvaluationResult
from finetune_crds.status import FineTuneJobStatus, SplitCounts
from finetune_operator import names
from finetune_operator.errors import Problem
from finetune_operator.finetunejob.children import find_owner, has_ended, is_alive, is_being_deleted
from finetune_operator.finetunejob.decide import decide
from finetune_operator.finetunejob.decide.phase import phase
from finetune_operator.finetunejob.decide.usage import running_span
from finetune_operator.finetunejob.model import (
    CancelRun,
    Decision,
    Deletion,
    DryRunAnswer,
    EnsureRun,
    FineTuneJob,
    FinishRun,
    LogMetrics,
    Mlflow,
    Observed,
    SetAlias,
    SubmitRun,
    TagVersion,
)
from finetune_operator.mlflow.model import Run
from finetune_operator.registry.base import RegisteredVersion
from worlds.memory.decisions import (
    EVICTED,
    FINE,
    NODES,
    SETTINGS,
    SOURCE,
    SPLITS,
    child,
    component,
    ended,
    ftj,
    later,
    pod,
    stamped,
)

Json = dict[str, Any]
# By the uid of a pod's Job, the pod's name, and when it started.
Counted = dict[tuple[str, str, str], int]
MAX_RESTARTS = 1
CODES = st.sampled_from([0, 0, 0, 0, 0, 1, 75, 137, 64])
NUMBERS = st.one_of(st.floats(0, 1000), st.sampled_from([float("nan"), float("inf"), float("-inf"), -1.0]))
PREPARED = TerminationMessage(
    prep=PrepResult(rows=SplitCounts(train=9), tokens=SplitCounts(train=90), path="/data/splits", version=1)
)
TRAINED = TerminationMessage(train=TrainResult(step=10, eval_loss=2.0))
EVALUATED = TerminationMessage(
    evaluation=EvaluationResult(rows=5, digest="e1", metrics={"eval_f1": 0.5}, base={"eval_f1": 0.25})
)
RESULTS = {names.PREP: PREPARED, names.TRAIN: TRAINED, names.EVALUATE: EVALUATED}
CONTAINERS = {names.PREP: "prep", names.TRAIN: "trainer", names.EVALUATE: "evaluate"}
FAILED = TerminationMessage(error=PodError(reason="Boom", message="it blew up"))
REFUSED = DryRunAnswer(admitted=False, reason=ConditionReason.POD_REJECTED, message="they would be refused")
AWAY = Problem(ConditionReason.MLFLOW_UNREACHABLE, "MLflow is away")


@dataclass
class World:
    """What exists, as far as decisions and chance have brought it about."""

    parts: Json
    status: FineTuneJobStatus = field(default_factory=FineTuneJobStatus)
    suspend: bool = False
    seconds: int = 0
    jobs: dict[str, Json] = field(default_factory=dict)
    pods: list[Json] = field(default_factory=list)
    away: bool = False
    admits: bool = True
    """Whether the API server would create the training pods."""
    generation: int = 1
    run: Run | None = None
    version: RegisteredVersion | None = None
    logged: Counter[str] = field(default_factory=Counter)
    """How often each number of the evaluation was logged to the run."""
    ran: set[str] = field(default_factory=set)
    """Jobs whose every pod ended well."""
    started: list[int] = field(default_factory=list)
    """When each pod started that ever did, in seconds."""
    counted: Counted = field(default_factory=dict)
    """What the status that was written holds at least of each pod, in seconds."""

    @property
    def now(self) -> datetime:
        return later(self.seconds)

    def ftj(self) -> FineTuneJob:
        resource = ftj(self.status, suspend=self.suspend, **self.parts)
        return dataclasses.replace(resource, generation=self.generation)

    def observed(self) -> Observed:
        mlflow = Mlflow(problem=AWAY) if self.away else Mlflow(run=self.run, version=self.version)
        answer = FINE if self.admits else REFUSED
        return Observed(jobs=dict(self.jobs), pods=tuple(self.pods), mlflow=mlflow, dry_run_answer=answer)

    def decide(self) -> Decision:
        return decide(self.ftj(), self.observed(), self.now, SETTINGS)

    def carry_out(self, decision: Decision) -> None:
        """What `apply` does, but for the status."""
        for item in decision.delete:
            self._delete(item)
        for body in decision.apply:
            if body["kind"] == "Job":
                job = child(
                    body["metadata"]["name"],
                    uid=f"uid-{self.seconds}-{len(self.pods)}",
                    annotations=body["metadata"].get("annotations", {}),
                )
                self.jobs.setdefault(body["metadata"]["name"], job)
        for action in decision.actions:
            assert not isinstance(action, SubmitRun | CancelRun)
            self._act(action)

    def pass_over(self) -> None:
        """A whole pass."""
        decision = self.decide()
        check(self, decision)
        self.carry_out(decision)
        self.write(decision)

    def write(self, decision: Decision) -> None:
        """The status of a decision is written."""
        self.counted, self.status = at_least(self), decision.status

    def _delete(self, item: Deletion) -> None:
        """In the foreground: the Job stays until its pods are gone."""
        body = self.jobs.get(item.name)
        if body and body["metadata"]["uid"] == item.uid:
            stopping = {**body["metadata"], "deletionTimestamp": "2026-08-01T12:00:00Z"}
            self.jobs[item.name] = {**body, "metadata": stopping}
            self._collect()

    def _collect(self) -> None:
        """Remove the Jobs that are being deleted and have no pods left."""
        for name, body in list(self.jobs.items()):
            if is_being_deleted(body) and not self.pods_of(name):
                del self.jobs[name]

    def _act(self, action: EnsureRun | FinishRun | LogMetrics | SetAlias | TagVersion) -> None:
        if self.away:
            return
        if isinstance(action, EnsureRun):
            self.run = self.run or Run("r1", "e1", "RUNNING")
        elif isinstance(action, FinishRun) and self.run:
            self.run = dataclasses.replace(self.run, status=action.status)
        elif isinstance(action, LogMetrics) and self.run:
            self.logged.update(action.metrics.keys())
            self.run = dataclasses.replace(self.run, metrics={**self.run.metrics, **action.metrics})
        elif isinstance(action, TagVersion) and self.version and self.version.version == action.version:
            self.version = dataclasses.replace(self.version, tags={**self.version.tags, **action.tags})
        elif isinstance(action, SetAlias) and self.version:
            aliases = self.version.aliases | {action.alias}
            self.version = dataclasses.replace(self.version, aliases=frozenset(aliases))

    def at_work(self) -> list[str]:
        return [name for name, item in self.jobs.items() if not has_ended(item)]

    def pods_of(self, name: str) -> list[Json]:
        uid = self.jobs[name]["metadata"]["uid"]
        return [item for item in self.pods if find_owner("Pod", item) == ("team", uid)]

    # What may happen.

    def pods_run(self, *, ready: bool) -> None:
        for name in self.at_work():
            if not self.pods_of(name) and not is_being_deleted(self.jobs[name]):
                identity = self._identity(name)
                self.pods += [
                    pod(name, index, ready=ready, gpus=1, startTime=stamped(self.seconds), **identity)
                    for index in range(size(name))
                ]
                self.started += [self.seconds] * size(name)

    def pods_end(self, *, codes: tuple[int, int], speaks: bool, evicted: bool, registers: bool) -> None:
        """Every Job at work ends, as its pods do."""
        for name in self.at_work():
            job_pods = self.pods_of(name)
            self.pods = [item for item in self.pods if item not in job_pods]
            start = job_pods[0]["status"]["startTime"] if job_pods else stamped(self.seconds)
            for index, code in enumerate(codes[: size(name)]):
                message = (FAILED if code else RESULTS[component(name)]) if speaks else ""
                more: Json = {"conditions": EVICTED} if evicted and code else {}
                more |= {"startTime": start, "at": self.seconds, "gpus": 1}
                container = CONTAINERS[component(name)]
                identity = self._identity(name)
                self.pods.append(ended(name, index, code, message, container=container, **identity, **more))
            failed = any(codes[: size(name)])
            self.ran |= set() if failed else {name}
            uid = self.jobs[name]["metadata"]["uid"]
            meta: Json = {"deletionTimestamp": "t"} if is_being_deleted(self.jobs[name]) else {}
            meta["annotations"] = self.jobs[name]["metadata"]["annotations"]
            self.jobs[name] = child(name, "Failed" if failed else "Complete", "it ended", uid=uid, **meta)
            if size(name) > 1 and not failed and registers:
                self.version = RegisteredVersion("m", "1")

    def _identity(self, name: str) -> Json:
        return {"owner": self.jobs[name]["metadata"]["uid"], "component": component(name)}

    def pods_vanish(self, *, all_of_them: bool) -> None:
        """Pods without a Job stop; or every pod goes."""
        uids = {
            ("team", item["metadata"]["uid"]) for item in self.jobs.values() if not is_being_deleted(item)
        }
        self.pods = [item for item in self.pods if not all_of_them and find_owner("Pod", item) in uids]
        self._collect()

    def a_child_vanishes(self, *, index: int) -> None:
        for name in sorted(self.jobs)[index : index + 1]:
            del self.jobs[name]

    def mlflow_comes_or_goes(self) -> None:
        self.away = not self.away

    def mlflow_loses_everything(self) -> None:
        self.run = self.version = None
        self.logged.clear()

    def somebody_registers_another_version(self) -> None:
        if self.version:
            self.version = RegisteredVersion("m", str(int(self.version.version) + 1))
            self.logged.clear()

    def the_trainer_reports(self, *, metrics: dict[str, float], checkpoint_error: str) -> None:
        if self.run:
            tags = {TAG_CHECKPOINT_ERROR: checkpoint_error}
            self.run = dataclasses.replace(self.run, metrics={**self.run.metrics, **metrics}, tags=tags)

    def people_suspend_or_resume(self) -> None:
        self.suspend = not self.suspend
        self.generation += 1

    def a_policy_comes_or_goes(self) -> None:
        self.admits = not self.admits

    def time_passes(self, *, seconds: int) -> None:
        self.seconds += seconds


def size(name: str) -> int:
    """How many pods a child Job has."""
    return 2 if component(name) == names.TRAIN else 1


def happening(name: str, **arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[tuple[str, Json]]:
    return st.tuples(st.just(name), st.fixed_dictionaries(arguments))


METRICS = st.sampled_from(
    ["step", "max_steps", "loss", "checkpoint_step", "goodput", "final_eval_loss", "seconds_remaining"]
)
# How often each happens: what moves a job on comes most often.
HAPPENINGS = [
    *[happening("pods_run", ready=st.booleans())] * 4,
    *[
        happening(
            "pods_end",
            codes=st.tuples(CODES, CODES),
            speaks=st.booleans(),
            evicted=st.booleans(),
            registers=st.booleans(),
        )
    ]
    * 4,
    *[happening("pods_vanish", all_of_them=st.booleans())] * 2,
    *[happening("people_suspend_or_resume")] * 2,
    *[happening("time_passes", seconds=st.sampled_from([1, 30, 400, 1500]))] * 2,
    happening("a_child_vanishes", index=st.integers(0, 3)),
    happening("mlflow_comes_or_goes"),
    happening("a_policy_comes_or_goes"),
    happening("mlflow_loses_everything"),
    happening("somebody_registers_another_version"),
    *[
        happening(
            "the_trainer_reports",
            metrics=st.dictionaries(METRICS, NUMBERS, max_size=4),
            checkpoint_error=st.sampled_from(["", "no space is left"]),
        )
    ]
    * 2,
]
JOBS = st.fixed_dictionaries(
    {
        "data": st.sampled_from([SOURCE, SPLITS]),
        "distributed": st.just(NODES),
        "register": st.sampled_from([{"model": "m"}, None]),
        "evaluation": st.sampled_from([{}, None]),
        "checkpoint": st.sampled_from([{"uri": "/c"}, None]),
        "runPolicy": st.fixed_dictionaries(
            {
                "maxRestarts": st.just(MAX_RESTARTS),
                "activeDeadlineSeconds": st.sampled_from([None, None, 300]),
                "ttlSecondsAfterFinished": st.sampled_from([None, 60]),
            }
        ),
    }
).map(lambda parts: parts if parts["register"] else parts | {"evaluation": None})
# Each thing that happens is looked at a few times; a look may end before the status is written.
LOOKS = st.lists(st.sampled_from(["whole", "whole", "whole", "cut short"]), max_size=4)
STORIES = st.lists(
    st.tuples(st.integers(0, len(HAPPENINGS) - 1).flatmap(HAPPENINGS.__getitem__), LOOKS),
    min_size=12,
    max_size=25,
)


Story = list[tuple[tuple[str, Json], list[str]]]


def told(parts: Json, story: Story) -> World:
    """The world after a story; what must hold at every step is checked."""
    world = World(parts)
    older = [world.status]
    for (name, arguments), looks in [(("pods_run", {"ready": True}), ["whole", "whole"]), *story]:
        getattr(world, name)(**arguments)
        for look in looks:
            decision = world.decide()
            check(world, decision)
            check_it_settles(world, decision)
            world.carry_out(decision)
            if look == "whole":
                world.write(decision)
                older.append(decision.status)
    for status in older:
        # A status that is no longer true: the API server refuses what is written on top of it.
        decide(dataclasses.replace(world.ftj(), status=status), world.observed(), world.now, SETTINGS)
    return world


def check_it_comes_to_its_end(world: World) -> None:
    """When nothing goes wrong any more, the job succeeds, unless what went wrong before ends it."""
    world.away, world.admits = False, True
    if world.suspend:
        world.people_suspend_or_resume()
    for _ in range(6):
        world.pods_vanish(all_of_them=False)
        world.pass_over()
    if is_over(world.status):
        return
    for _ in range(8):
        world.time_passes(seconds=seconds_to_wait(world))
        world.pass_over()
        world.pods_run(ready=True)
        world.pass_over()
        world.pods_end(codes=(0, 0), speaks=True, evicted=False, registers=True)
        trained = any(
            item.type == ConditionType.TRAINED and item.status == "True" for item in world.status.conditions
        )
        if trained and world.version is None:
            world.version = RegisteredVersion("m", "1")
        for _ in range(3):
            world.pods_vanish(all_of_them=False)
            world.pass_over()
        if is_over(world.status):
            break
    reasons = [item.reason for item in ends(world.status) if item.status == "True"]
    limited = world.parts["runPolicy"]["activeDeadlineSeconds"] is not None
    assert reasons == [ConditionReason.SUCCEEDED] or (
        limited and reasons == [ConditionReason.DEADLINE_EXCEEDED]
    ), f"it never succeeds: {world.status}"


def seconds_to_wait(world: World) -> int:
    """Seconds until the next attempt may start, or a run that MLflow does not find is replaced."""
    if any(item.reason == ConditionReason.RUN_NOT_FOUND for item in world.status.conditions):
        return int(SETTINGS.registration_patience_seconds)
    at = world.status.restart_time
    return max(int((at - world.now).total_seconds()) + 1, 1) if at else 1


def check(world: World, decision: Decision) -> None:
    before, after = world.status, decision.status
    assert (after.attempt or 0) >= (before.attempt or 0)
    assert (before.restarts or 0) <= (after.restarts or 0) <= MAX_RESTARTS
    assert phase(after.conditions) == after.phase
    check_ready(after)
    check_usage(world, decision)
    check_it_can_be_written(after)
    if is_over(before):
        assert decision.apply == ()
        assert ends(after) == ends(before)
    elif after.phase == "Succeeded":
        assert names.train_name("tune", after.attempt or 0) in world.ran, "it succeeds without training"
        assert world.version or not world.parts["register"], "it succeeds without a version"
    if any(
        (item.reason, item.status) == (ConditionReason.MAX_RESTARTS_REACHED, "True") for item in ends(after)
    ):
        assert after.restarts == MAX_RESTARTS, "it fails before it was restarted as often as it may be"
    new_jobs = {body["metadata"]["name"] for body in decision.apply if body["kind"] == "Job"}
    deleted_jobs = {item.name for item in decision.delete}
    training = [name for name in {*world.at_work(), *new_jobs} - deleted_jobs if size(name) > 1]
    assert len(training) <= 1, f"two gangs at once: {training}"
    check_evaluation(world, decision)
    if new_jobs:
        [of_made] = {component(name) for name in new_jobs}
        step_pods = [
            item for item in world.pods if item["metadata"]["labels"][names.LABEL_COMPONENT] == of_made
        ]
        assert [item for item in step_pods if is_alive(item)] == [], "two gangs' pods at once"


def check_evaluation(world: World, decision: Decision) -> None:
    """No alias moves to a version that lacks its numbers, no number is logged twice, and nothing is evaluated untrained."""
    if world.ftj().spec is None or world.parts["evaluation"] is None:
        return
    if any(isinstance(action, SetAlias) for action in decision.actions):
        assert world.version is not None
        assert world.version.tags.get(TAG_EVALUATION_DATA), "an alias moves to a version without its numbers"
    assert max(world.logged.values(), default=0) <= 1, "a number is logged twice"
    if names.evaluate_name("tune") in {body["metadata"]["name"] for body in decision.apply}:
        assert world.version is not None, "there is no version to evaluate"
    if decision.status.phase == "Succeeded" and not is_over(world.status):
        assert world.version is not None
        assert world.version.tags.get(TAG_EVALUATION_DATA), "it succeeds without an evaluation"


def check_usage(world: World, decision: Decision) -> None:
    """It never shrinks, no pod counts for longer than since it started, and none is left out."""
    before, after = used(world.status), used(decision.status)
    assert before <= after <= sum(world.seconds - start for start in world.started), "a pod counts twice"
    assert after >= sum(at_least(world).values()), "a pod does not count"


def at_least(world: World) -> Counted:
    """What has to be counted by now: of a pod that runs, all but the last ten minutes."""
    if is_over(world.status):
        return world.counted
    pod_seconds = dict(world.counted)
    for item in world.pods:
        ran = running_span(item)
        if ran is None:
            continue
        end = ran.end or world.now - timedelta(minutes=10)
        meta = item["metadata"]
        key = (meta["ownerReferences"][0]["uid"], meta["name"], item["status"]["startTime"])
        pod_seconds[key] = max(pod_seconds.get(key, 0), int((end - ran.start).total_seconds()))
    return pod_seconds


def used(status: FineTuneJobStatus) -> int:
    """The GPU seconds, of pods with one GPU each."""
    gpu_seconds = [item.gpu_seconds for item in status.usage.jobs] if status.usage else []
    assert gpu_seconds == [item.pod_seconds for item in (status.usage.jobs if status.usage else [])]
    return sum(gpu_seconds)


def check_it_settles(world: World, decision: Decision) -> None:
    """Looking again at the same world, without what was decided being done, soon changes nothing any more."""
    for _ in range(3):
        resource = dataclasses.replace(world.ftj(), status=decision.status)
        again = decide(resource, world.observed(), world.now, SETTINGS)
        if again.status == decision.status:
            return
        decision = again
    raise AssertionError(f"the status never settles: {decision.status}")


def check_it_can_be_written(status: FineTuneJobStatus) -> None:
    """It fits the schema, and JSON."""
    text = json.dumps(status.to_json(), allow_nan=False)
    assert FineTuneJobStatus.model_validate_json(text) == status


def check_ready(status: FineTuneJobStatus) -> None:
    """Ready holds for a job that succeeded and no other, and repeats another condition."""
    ready = next(item for item in status.conditions if item.type == ConditionType.READY)
    assert (ready.status == "True") == (status.phase == "Succeeded")
    other_conditions = [(item.reason, item.message) for item in status.conditions if item is not ready]
    assert (ready.reason, ready.message) in other_conditions


def ends(status: FineTuneJobStatus) -> list[Condition]:
    return [
        item for item in status.conditions if item.type in (ConditionType.SUCCEEDED, ConditionType.FAILED)
    ]


def is_over(status: FineTuneJobStatus) -> bool:
    return any(item.status == "True" for item in ends(status))
