"""Only the modules that run before the first thread of a process change its environment."""

from __future__ import annotations

import ast
from pathlib import Path

import finetune_trainer

# Methods of `os.environ` that change it.
_CHANGES = {"setdefault", "update", "pop", "popitem", "clear", "__setitem__"}
ALLOWED = {
    "pod/library_variables.py": "at the start of each process",
    "prep/databricks.py": "at the start of a Databricks run",
    "prep/spark/session.py": "at the start of a preparation",
    "prep/steps/tokens.py": "in a Python worker of Spark, which has one thread",
    "examples/tokenizer.py": "in a Python worker of Spark, which has one thread",
    "sinks/wandb_run.py": "at the start of the process of a sink",
    "train/launch.py": "in the launcher, before it starts ranks",
    "train/delivery/upload.py": "before the first thread, and later only to replace the value of a variable",
}


def is_environment(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def changes_environment(node: ast.AST) -> bool:
    match node:
        case ast.Subscript(value=value, ctx=ast.Store() | ast.Del()):
            return is_environment(value)
        case ast.Call(func=ast.Attribute(value=value, attr=method)):
            return method in ("putenv", "unsetenv") or (method in _CHANGES and is_environment(value))
        case ast.AugAssign(target=target):
            return is_environment(target)
    return False


def test_no_other_module_changes_the_environment() -> None:
    folder = Path(finetune_trainer.__file__).parent
    changing = {
        str(file.relative_to(folder))
        for file in folder.rglob("*.py")
        if any(map(changes_environment, ast.walk(ast.parse(file.read_text(encoding="utf-8")))))
    }
    assert changing == {*ALLOWED}


# Processes that inherit the variables from the process that starts them, or that use none of the libraries.
WITHOUT_DEFAULTS = {
    "pod/checkout.py",
    "prep/spark/executor.py",
    "prep/spark/spark_application.py",
    "sinks/__main__.py",
    "train/__main__.py",
}


def test_every_other_process_sets_the_defaults_at_its_start() -> None:
    folder = Path(finetune_trainer.__file__).parent
    texts = {str(file.relative_to(folder)): file.read_text(encoding="utf-8") for file in folder.rglob("*.py")}
    programs = {name for name, text in texts.items() if '__name__ == "__main__"' in text}
    setting = {name for name in programs if "library_variables.set_defaults(" in texts[name]}
    assert programs - setting == WITHOUT_DEFAULTS
