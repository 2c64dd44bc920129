"""The results to show when the job has succeeded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from demo.install import BROWSER_URL, NAMESPACE, RELEASE, SYSTEM, Installation

if TYPE_CHECKING:
    from demo.kubectl import Json
    from demo.place import Place

QUESTION = "What does json.dumps do?"


def ask(installation: Installation, job: Json) -> str:
    """One answer of the registered model, which a separate pod loads by its alias."""
    model, alias = job["status"]["model"]["name"], job["status"]["model"]["aliases"][0]
    installation.delete("job", "ask")
    installation.start_script("ask", f"python ask.py 'models:/{model}@{alias}' '{QUESTION}'")
    log = installation.finish_script("ask")
    return log.partition("ANSWER ")[2].strip()


def summary(place: Place, job: Json, answer: str) -> list[str]:
    """The lines that the demo ends with."""
    status = job["status"]
    model, data = status["model"], status["data"]
    rows = data["rows"]
    kubectl = f"{place.kubectl.program} --kubeconfig {place.kubectl.kubeconfig}"
    name = job["metadata"]["name"]
    return [
        "",
        "The resource",
        *(
            f"  {line}"
            for line in place.kubectl(
                "get", "ftj", name, "--namespace", NAMESPACE, "--output", "wide"
            ).splitlines()
        ),
        "",
        f"Model       {model['name']} version {model['version']}, alias {', '.join(model.get('aliases', []))}: {model['uri']}",
        f"Evaluation  loss {model['baseEvalLoss']:.3f} before, {model['evalLoss']:.3f} after (perplexity {model['perplexity']:.1f})",
        f"Data        {data['path']} version {data['version']}: "
        f"{rows['train']} rows to train on, {rows['validation']} to evaluate on, {rows['test']} held out",
        f"MLflow      {status['mlflow']['url']}",
        f"            after: {kubectl} -n {SYSTEM} port-forward service/{RELEASE}-mlflow {BROWSER_URL.rpartition(':')[2]}",
        f"Question    {QUESTION}",
        f"Answer      {answer}",
        "",
        "Look around with",
        f"  {kubectl} -n {NAMESPACE} describe ftj {name}",
    ]
