"""The local cluster as controlled from this machine: up, down, and the requests in between."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from cluster import binaries, cgroups, images, network, packages, plan, snapshots, supervisor
from cluster.binaries import say
from cluster.paths import PACKAGE, ClusterError, State, clusters
from cluster.process import end, run, start_time
from support.cache import cache

# Longer than the waits of the supervisor together (support.waiting.PATIENCE for each of its steps), whose errors say more.
_UP_TIMEOUT_SECONDS = 600
_PROGRAMS = ("kube", "kubectl", "pause", "networkpolicies")


def up(name: str, nodes: int = 2) -> Path:
    """Bring a cluster up, or find it up; return its kubeconfig's path."""
    state = State(name)
    settings = plan.Plan(name, 0, nodes)
    with _locked(f"{name}.lock"):
        if is_up(state):
            say(f"cluster {name} is up")
            return state.kubeconfig
        if state.directory.exists():
            say(f"clearing away what is left of an earlier cluster {name}")
            _down(state)
        began = time.monotonic()
        _install()
        binaries.ensure(*_PROGRAMS)
        pause = images.pause()
        with _locked("clusters.lock"):
            settings = plan.Plan(name, _free_index(), nodes)
            for folder in (state.directory, state.logs, state.control):
                folder.mkdir(parents=True)
            settings.save(state.settings)
            _make_shadowed()
        try:
            _start(state, settings, pause)
            _follow(state, began)
        except KeyboardInterrupt:
            say("interrupted, taking the cluster away")
            _down(state)
            raise
    return state.kubeconfig


def down(name: str) -> None:
    """Take everything of a cluster away; nothing happens if there is nothing."""
    with _locked(f"{name}.lock"):
        _down(State(name))


def is_up(state: State) -> bool:
    """Whether the cluster runs and was ready once."""
    return bool(_supervisor(state)) and state.progress.exists() and supervisor.READY in _steps(state)


def status(name: str) -> dict[str, object]:
    """What there is of a cluster."""
    state = State(name)
    summary: dict[str, object] = {"name": name, "up": is_up(state), "state": str(state.directory)}
    settings = plan.load(state.settings)
    if settings is not None and is_up(state):
        summary |= {
            "kubeconfig": str(state.kubeconfig),
            "server": settings.server,
            "nodes": {settings.node_name(n): settings.node_address(n) for n in range(1, settings.nodes + 1)},
            "hostAddressForPods": settings.host_address,
            "kubectl": str(binaries.path("kubectl")),
            "enter": f"nsenter --target {_supervisor(state)} --net --mount --pid",
            "logs": str(state.logs),
        }
    return summary


def ask(name: str, verb: str, target: str, timeout: float = 60) -> None:
    """Have the supervisor do something to a node or process (start, stop, crash), and wait until it is done."""
    state = State(name)
    if not is_up(state):
        raise ClusterError(f"cluster {name} is not up")
    request = state.control / f"{verb}.{target}"
    request.touch()
    deadline = time.monotonic() + timeout
    while request.exists():
        if time.monotonic() > deadline or not is_up(state):
            raise ClusterError(f"cluster {name} did not {verb} {target}: see {state.logs / 'supervisor.log'}")
        time.sleep(0.05)


def prepare() -> None:
    """Build the programs of a cluster beside the project's images, and give nodes the images to begin with."""
    _install()
    binaries.check(*_PROGRAMS, "versitygw")
    with ThreadPoolExecutor(1) as aside:
        # The first time, the images' packages come over the network while the programs are built.
        building = aside.submit(_all_images)
        binaries.ensure(*_PROGRAMS, "versitygw")
        snapshots.ensure([*building.result().values(), images.pause()])


def _install() -> None:
    """Install the programs of the distribution that nodes and images need."""
    packages.ensure(*packages.NODES, *packages.IMAGES, cni=True)


def build_images(name: str, project_images: list[images.Image]) -> dict[str, str]:
    """Build the project's images, and those that stand in for public ones, and give them to every node."""
    references = _all_images() if len(project_images) == len(images.PROJECT) else images.build(project_images)
    if is_up(State(name)):
        _give(name, list(references.values()))
    else:
        snapshots.ensure({*snapshots.references(), *references.values(), images.pause()})
    return references


def _all_images() -> dict[str, str]:
    return images.build(images.PROJECT) | {
        "IMAGE_PYTHON": images.base_reference(),
        images.OBJECT_STORE: images.versitygw(),
    }


def _give(name: str, references: list[str]) -> None:
    """Give images to every node of a cluster that is up."""
    settings, pid = plan.load(State(name).settings), _supervisor(State(name))
    if settings is None or not pid:
        raise ClusterError(f"cluster {name} is not up")
    for number in range(1, settings.nodes + 1):
        socket = f"/run/{settings.node_name(number)}.sock"
        enter = ["nsenter", "--target", str(pid), "--net", "--mount"]
        snapshots.add([*enter, *snapshots.client(socket)], references)


def _start(state: State, settings: plan.Plan, pause: str) -> None:
    """Start the supervisor in its namespaces and lay the cable to it."""
    unshare = ["unshare", "--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    python = [sys.executable, "-m", "cluster", "supervise", "--name", settings.name, "--pause", pause]
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "PATH": packages.SEARCHED}
    with (state.logs / "supervisor.log").open("ab") as log:
        launcher = subprocess.Popen(
            [*unshare, "--mount-proc", *python],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environment,
            start_new_session=True,
        )
    started = {"launcher": {"pid": launcher.pid, "started": start_time(launcher.pid)}}
    _write(state.process, started)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    deadline = time.monotonic() + 10
    while not (child_pids := children.read_text().split()):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise ClusterError(f"the supervisor does not start: see {state.logs / 'supervisor.log'}")
        time.sleep(0.02)
    first = int(child_pids[0])
    started["first"] = {"pid": first, "started": start_time(first)}
    _write(state.process, started)
    # NB: Popen would warn of a process that outlives us; this one is meant to.
    launcher.returncode = 0
    network.connect(settings, first)


def _follow(state: State, began: float) -> None:
    """Say what the supervisor does until it is ready."""
    shown = 0
    deadline = time.monotonic() + _UP_TIMEOUT_SECONDS
    while True:
        steps = _steps(state)
        for step in steps[shown:]:
            if step.startswith(supervisor.FAILED):
                raise ClusterError(f"{step}\nthe logs are in {state.logs}")
            say(f"{time.monotonic() - began:5.1f} s  {step}")
        shown = len(steps)
        if supervisor.READY in steps:
            return
        if not _supervisor(state):
            raise ClusterError(f"the supervisor has ended: see {state.logs / 'supervisor.log'}")
        if time.monotonic() > deadline:
            raise ClusterError(f"not ready after {_UP_TIMEOUT_SECONDS} seconds: the logs are in {state.logs}")
        time.sleep(0.1)


def _down(state: State) -> None:
    if not state.directory.exists():
        return
    for role in ("first", "launcher"):
        recorded = _recorded(state).get(role)
        if recorded:
            end(recorded["pid"], recorded["started"])
    settings = plan.load(state.settings)
    if settings is not None:
        network.disconnect(settings)
        cgroups.kill(settings.cgroup)
        cgroups.remove(settings.cgroup)
    remove(state.directory)
    with _locked("clusters.lock"):
        if not any(each.is_dir() for each in clusters().iterdir()):
            _unmake_shadowed()


def remove(directory: Path) -> None:
    """Remove a folder, and the rest of an earlier removal. The name is free at once, the space when removal is complete."""
    removed = cache() / "removed"
    removed.mkdir(exist_ok=True)
    directory.rename(removed / f"{directory.name}-{time.time_ns()}")
    remover = subprocess.Popen(["rm", "-rf", *map(str, removed.iterdir())], start_new_session=True)
    try:
        # NB: where discarded blocks are slow, gigabytes of images take minutes to go.
        remover.wait(20)
    except subprocess.TimeoutExpired:
        remover.returncode = 0
        say(f"{removed} is still being removed in the background")


def _free_index() -> int:
    plans = [plan.load(State(each.name).settings) for each in clusters().iterdir() if each.is_dir()]
    used_indexes = {settings.index for settings in plans if settings}
    links = run("ip", "-brief", "link")
    for index in range(plan.MOST_CLUSTERS):
        if index not in used_indexes and f"{plan.Plan('a', index, 1).host_link}@" not in links:
            return index
    raise ClusterError(f"there are {plan.MOST_CLUSTERS} clusters already")


def _make_shadowed() -> None:
    created_folders = clusters() / ".made"
    for folder in supervisor.SHADOWED:
        if not folder.exists():
            folder.mkdir(parents=True)
            with created_folders.open("a") as file:
                file.write(f"{folder}\n")


def _unmake_shadowed() -> None:
    created_folders = clusters() / ".made"
    if created_folders.exists():
        for line in created_folders.read_text().splitlines():
            try:
                Path(line).rmdir()
            except OSError:
                continue
        created_folders.unlink()


def _supervisor(state: State) -> int:
    """The supervisor's process id, or 0 when it has ended."""
    first = _recorded(state).get("first")
    return first["pid"] if first and start_time(first["pid"]) == first["started"] else 0


def _recorded(state: State) -> dict[str, dict[str, int]]:
    try:
        processes: dict[str, dict[str, int]] = json.loads(state.process.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return processes


def _steps(state: State) -> list[str]:
    try:
        return state.progress.read_text().splitlines()
    except FileNotFoundError:
        return []


def _write(file: Path, content: object) -> None:
    new = file.with_suffix(".new")
    new.write_text(json.dumps(content) + "\n")
    new.rename(file)


def _locked(name: str) -> FileLock:
    clusters().mkdir(parents=True, exist_ok=True)
    return FileLock(clusters() / name)
