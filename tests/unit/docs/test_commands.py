"""Every command in README.md and in the documentation names targets, resources, values and files that exist."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft4Validator

from finetune_operator import names
from support.documents import ROOT, Block, blocks
from support.manifests import KINDS, SCHEMAS
from unit.docs.test_manifests import strict

Json = dict[str, Any]
Words = list[str]
Problems = Iterator[str]

CONSOLE = blocks("console")
MAKEFILE = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "tests/lock.mk"))
VALUES: Json = yaml.safe_load((ROOT / "charts/finetune-operator/values.yaml").read_text(encoding="utf-8"))
# Names by which kubectl knows our kinds, and what else the pages look at.
OURS = {
    name: kind for kind, model in KINDS.items() for name in (model.PLURAL, kind.lower(), *model.SHORT_NAMES)
}
OTHERS = {"lease", "secret", "namespace", "nodes", "pods", "events", "jobs"}
VERBS = {
    "apply",
    "config",
    "create",
    "delete",
    "describe",
    "explain",
    "get",
    "kustomize",
    "logs",
    "patch",
    "port-forward",
    "rollout",
    "scale",
    "taint",
    "wait",
}


def commands(block: Block) -> list[str]:
    """The commands of a block: what follows a prompt, with the lines that continue it."""
    joined = block.text.replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line.startswith("$ ")]


def problems(command: str) -> Problems:
    """What is wrong with a command."""
    for inner in re.findall(r"\$\((.+?)\)", command):
        yield from problems(inner)
    words = shlex.split(command, comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    if words and words[0] in ("export", "eval"):
        return
    check = PROGRAMS.get(words[0]) if words else None
    if check is None:
        yield f"nothing is known of the program in: {command}"
        return
    yield from check(words[1:])


def _echo(words: Words) -> Problems:
    """A part of a manifest, which the next command reads."""
    manifest, pipe, *command = words
    part = yaml.safe_load(manifest)
    body = {name: value for name, value in part.items() if name not in ("apiVersion", "kind", "metadata")}
    yield from _patch(part["kind"].lower(), json.dumps(body))
    yield from problems(shlex.join(command)) if pipe == "|" else ["nothing reads the manifest"]


def _make(words: Words) -> Problems:
    for word in words:
        name, is_setting, value = word.partition("=")
        if is_setting:
            if f"$({name})" not in MAKEFILE:
                yield f"the Makefile reads no {name}"
            yield from (
                _python(["-m", "cluster", *value.split()])
                if name == "ARGS"
                else _options_of_benchmarks(value)
            )
        elif not re.search(
            rf"^(?:{re.escape(word)}:|{re.escape(word.replace('programs-', 'PROGRAMS_'))} :=)",
            MAKEFILE,
            re.MULTILINE,
        ):
            yield f"make has no target {word}"


def _options_of_benchmarks(value: str) -> Problems:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/bench").rglob("*.py"))
    for option in re.findall(r"--[a-z-]+", value):
        if f'"{option}"' not in sources:
            yield f"no benchmark has the option {option}"


def _kubectl(words: Words) -> Problems:
    options, rest = _split(words, {"-n", "--namespace", "-l", "-o", "-p", "-f", "-k", "--type"})
    if not rest or rest[0] not in VERBS:
        yield f"kubectl has no verb {rest[:1]}"
        return
    verb, named = rest[0], rest[1:]
    if verb in ("get", "describe", "patch", "delete", "wait"):
        yield from _resources(named[0])
        if "," in named[0] and "--watch" in words:
            yield f"kubectl watches one kind at a time: {named[0]}"
    elif verb == "kustomize":
        yield from _file(f"{named[0]}/kustomization.yaml")
    elif verb == "explain":
        kind, *path = named[0].split(".")
        yield from _resources(kind)
        yield from _field(kind, path)
    yield from _options(named, options)


def _options(named: Words, options: dict[str, list[str]]) -> Problems:
    """What is wrong with the options of a command of kubectl about the resources that are named."""
    for label in options.get("-l", []):
        if label.partition("=")[0] not in vars(names).values():
            yield f"no label of ours is {label}"
    for folder in options.get("-k", []):
        yield from _file(f"{folder}/kustomization.yaml")
    for file in options.get("-f", []):
        # What `make` writes is not there yet.
        if "/" in file and not file.startswith("build/"):
            yield from _file(file)
    for patch in options.get("-p", []):
        yield from _patch(named[0], patch)
    for output in options.get("-o", []):
        for path in re.findall(r"\{\.([\w.]+)\}", output):
            yield from _field(named[0], path.split("."))


def _split(words: Words, with_value: set[str]) -> tuple[dict[str, list[str]], Words]:
    """The options of a command with their values, and the words that are no options."""
    options: dict[str, list[str]] = {}
    rest: Words = []
    left = iter(words)
    for word in left:
        if word in with_value:
            options.setdefault(word, []).append(next(left, ""))
        elif not word.startswith("-"):
            rest.append(word)
    return options, rest


def _resources(named: str) -> Problems:
    for name in named.split(","):
        if name.partition("/")[0] not in OURS.keys() | OTHERS:
            yield f"kubectl knows no resource {name}"


def _field(name: str, path: list[str]) -> Problems:
    schema = SCHEMAS.get(OURS.get(name, ""), {})
    for part in path:
        schema = schema.get("properties", {}).get(part)
        if schema is None:
            yield f"{name} has no field {'.'.join(path)}"
            return


def _patch(name: str, text: str) -> Problems:
    """A merge patch: null takes a field away, and what is required is there already."""
    schema = _partial(strict(SCHEMAS[OURS[name]]))
    for error in Draft4Validator(schema).iter_errors(_without_nulls(json.loads(text))):
        yield f"{error.json_path}: {error.message}"


def _partial(schema: Json) -> Json:
    found = {key: value for key, value in schema.items() if key != "required"}
    if "properties" in found:
        found["properties"] = {name: _partial(field) for name, field in found["properties"].items()}
    return found


def _without_nulls(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}


def _helm(words: Words) -> Problems:
    options, rest = _split(words, {"-n", "--namespace", "--set", "--values", "--version"})
    if not rest or rest[0] not in ("install", "upgrade", "rollback", "uninstall"):
        yield f"helm has no verb {rest[:1]}"
    for chart in rest[2:]:
        name = f"charts/{chart.rpartition('/charts/')[2]}" if chart.startswith("oci://") else chart
        yield from _file(f"{name}/Chart.yaml")
    for setting in options.get("--set", []):
        # What a list that is empty by default may hold is not in the values.
        key = setting.partition("=")[0].partition("[")[0]
        value: object = VALUES
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is None:
            yield f"the chart has no value {key}"


def _docker(words: Words) -> Problems:
    options, rest = _split(words, {"-t", "-f", "--target", "--build-arg"})
    if rest != ["build", "."]:
        yield f"images are built in the root of the repository, not by docker {' '.join(rest)}"
    file = Path(ROOT / options["-f"][0])
    if not file.exists():
        yield f"{options['-f'][0]} does not exist"
        return
    text = file.read_text(encoding="utf-8")
    for target in options.get("--target", []):
        if not re.search(rf"^FROM .* AS {target}$", text, re.MULTILINE | re.IGNORECASE):
            yield f"{options['-f'][0]} has no target {target}"
    for argument in options.get("--build-arg", []):
        if not re.search(rf"^ARG {argument.partition('=')[0]}\b", text, re.MULTILINE):
            yield f"{options['-f'][0]} has no argument {argument}"


def _code(text: str) -> Problems:
    """The modules that code imports exist."""
    for node in ast.walk(ast.parse(text)):
        for name in node.names if isinstance(node, ast.Import) else ():
            if importlib.util.find_spec(name.name) is None:
                yield f"there is no module {name.name}"


def _python(words: Words) -> Problems:
    """`-m` with a package of ours: the first word after it is one of its commands. `-c`: code that imports what is installed."""
    if words[0] == "-c":
        yield from _code(words[1])
        return
    if words[0] != "-m" or importlib.util.find_spec(words[1]) is None:
        yield f"there is no module {words[1:2]}"
        return
    spec = importlib.util.find_spec(f"{words[1]}.__main__")
    source = Path(spec.origin).read_text(encoding="utf-8") if spec and spec.origin else ""
    for word in words[2:]:
        if word.startswith("--") and f'"{word}"' not in source:
            yield f"{words[1]} has no option {word}"
    if len(words) > 2 and not words[2].startswith("-") and f'"{words[2]}"' not in source:
        yield f"{words[1]} has no command {words[2]}"


def _file(name: str) -> Problems:
    if not (ROOT / name).exists():
        yield f"{name} does not exist"


PROGRAMS: dict[str, Callable[[Words], Problems]] = {
    # Nothing of ours is in its commands.
    "aws": lambda _: iter(()),
    "echo": _echo,
    "make": _make,
    "kubectl": _kubectl,
    "helm": _helm,
    "docker": _docker,
    ".venv/bin/python": _python,
    "trainer_image/jars.sh": lambda _: _file("trainer_image/jars.sh"),
}


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_a_command_names_what_exists(block: Block) -> None:
    assert [problem for command in commands(block) for problem in problems(command)] == []


@pytest.mark.parametrize("block", CONSOLE, ids=str)
def test_a_block_has_commands_alone(block: Block) -> None:
    lines = block.text.replace("\\\n", " ").splitlines()
    assert [line for line in lines if not line.startswith("$ ")] == []


# A command that is wrong, and what is said of it.
BROKEN = {
    "make tests": "make has no target tests",
    "make lint TESTS=1": "the Makefile reads no TESTS",
    "make bench-trainer BENCH='--round 5'": "no benchmark has the option --round",
    "kubectl get ftjs": "kubectl knows no resource ftjs",
    "kubectl get ftj,mpp": "kubectl knows no resource mpp",
    "kubectl get ftj,mprom --watch": "kubectl watches one kind at a time: ftj,mprom",
    "kubectl show ftj": "kubectl has no verb ['show']",
    "kubectl explain finetunejob.spec.prepare": "finetunejob has no field spec.prepare",
    "kubectl get ftj a -o jsonpath='{.status.failure}'": "ftj has no field status.failure",
    "kubectl logs -l finetune.dev/jobs=a": "no label of ours is finetune.dev/jobs=a",
    "kubectl apply -f crds/samples/quick.yaml": "crds/samples/quick.yaml does not exist",
    "kubectl apply -k crds/samples": "crds/samples/kustomization.yaml does not exist",
    "kubectl kustomize crds/samples/tpu": "crds/samples/tpu/kustomization.yaml does not exist",
    """kubectl patch ftj a -p '{"spec":{"suspended":true}}'""": (
        "$.spec: Additional properties are not allowed ('suspended' was unexpected)"
    ),
    """kubectl patch mprom a -p '{"spec":{"approvals":[{"version":true,"by":"kim"}]}}'""": (
        "$.spec.approvals[0].version: True is not valid under any of the given schemas"
    ),
    "echo '{kind: ModelPromotion, spec: {approved: 1}}' | kubectl apply -f -": (
        "$.spec: Additional properties are not allowed ('approved' was unexpected)"
    ),
    "echo '{kind: ModelPromotion}' | kubectl show": "kubectl has no verb ['show']",
    "helm install a charts/finetune": "charts/finetune/Chart.yaml does not exist",
    "helm install a oci://r/charts/finetune --version 1": "charts/finetune/Chart.yaml does not exist",
    "helm upgrade a charts/finetune-operator --set image.train=b": "the chart has no value image.train",
    "docker build -t a -f operator/Containerfile .": "operator/Containerfile does not exist",
    "docker build -t a -f trainer_image/Dockerfile --target train .": "trainer_image/Dockerfile has no target train",
    "docker build -t a -f operator/Dockerfile --build-arg TORCH=1 .": "operator/Dockerfile has no argument TORCH=1",
    ".venv/bin/python -m cluster begin": "cluster has no command begin",
    "make cluster ARGS='begin --name demo'": "cluster has no command begin",
    "export A=$(.venv/bin/python -m clusters up)": "there is no module ['clusters']",
    ".venv/bin/python -c 'import boto33; boto33.put()'": "there is no module boto33",
    "kubeadm init": "nothing is known of the program in: kubeadm init",
}


@pytest.mark.parametrize(("command", "said"), BROKEN.items(), ids=BROKEN)
def test_what_is_wrong_is_found(command: str, said: str) -> None:
    assert said in [*problems(command)]
