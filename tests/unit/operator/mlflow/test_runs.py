"""Requests to an MLflow server that answers as told. tests/integration asks a real one."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from finetune_crds.conditions import ConditionReason
from finetune_operator import bounded
from finetune_operator.errors import PROTOCOL_CODES, ExternalError, Problem
from finetune_operator.mlflow import client
from finetune_operator.mlflow.client import Client, Credentials, LargeAnswerError
from finetune_operator.mlflow.model import Run
from finetune_operator.mlflow.runs import Server
from finetune_operator.registry.base import RegisteredVersion
from finetune_operator.registry.mlflow import MlflowRegistry
from finetune_operator.registry.outages import Outages
from support.counted import counted
from support.http_server import Answer, Request, serving

Json = dict[str, Any]
API = "/api/2.0/mlflow/"
HTML = "<html>please log in</html>"


@dataclass
class Answers:
    """What the server answers, by the end of the path, and what it was asked."""

    uri: str = ""
    by_path: dict[str, tuple[int, str | Json]] = field(default_factory=dict)
    default: tuple[int, str | Json] = (404, "nothing")
    asked: list[tuple[str, str]] = field(default_factory=list)
    authorization: str | None = None


@contextmanager
def answering() -> Iterator[Answers]:
    """A server that answers as told."""
    answers = Answers()

    def respond(request: Request) -> Answer:
        path = request.target.split("?")[0].removeprefix(API)
        answers.asked.append((request.method, path))
        answers.authorization = request.headers.get("Authorization")
        return Answer(*answers.by_path.get(path, answers.default))

    with serving(respond) as answers.uri:
        yield answers


@contextmanager
def accepting(handle: Callable[[socket.socket], object]) -> Iterator[str]:
    """A server that handles one connection, and then closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            connection, _ = server.accept()
            with connection:
                handle(connection)

        thread = threading.Thread(target=accept)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join(5)
        assert not thread.is_alive()


@pytest.fixture
def mlflow() -> Iterator[Answers]:
    with answering() as answers:
        yield answers


def ask(uri: str, credentials: Credentials | None = None) -> Run | None:
    return Server(uri, uri, credentials or Credentials()).find_run("u1", "team")


def problem(uri: str, credentials: Credentials | None = None) -> tuple[ConditionReason, str]:
    with pytest.raises(ExternalError) as raised:
        ask(uri, credentials)
    return raised.value.problem.reason, raised.value.problem.message


@pytest.mark.parametrize(
    "token",
    [
        "to\nken",
        "to\rken",
        "to\x00ken",
        "to\x01ken",
        "to\tken",
        "to\x7fken",
        "to\x85ken",
        "to\u2019ken",
        "t" * 8193,
    ],
    ids=["\\n", "\\r", "NUL", "SOH", "a tab", "DEL", "NEL", "a quote", "too long"],
)
def test_a_token_that_no_header_takes_is_no_word_of_the_server(token: str) -> None:
    assert problem("http://127.0.0.1:1", Credentials(token=token)) == (
        ConditionReason.CREDENTIALS_UNREADABLE,
        "the token for MLflow at http://127.0.0.1:1 contains a line break or another character that HTTP does not allow, or is too long: correct "
        "MLFLOW_TRACKING_TOKEN in the Secret in spec.tracking.secretRef",
    )


LONG: dict[str, tuple[Credentials, ConditionReason]] = {
    "a long password": (Credentials("me", "p" * 6142), ConditionReason.CREDENTIALS_UNREADABLE),
    "a long name": (Credentials("m" * 6144, "p"), ConditionReason.CREDENTIALS_UNREADABLE),
    "a password that is sent": (Credentials("me", "p" * 6141), ConditionReason.MLFLOW_UNREACHABLE),
    "a token that is sent": (Credentials(token="t" * 8192), ConditionReason.MLFLOW_UNREACHABLE),
}


@pytest.mark.parametrize(("login", "reason"), LONG.values(), ids=LONG)
def test_a_login_that_is_too_long_is_no_word_of_the_server(
    login: Credentials, reason: ConditionReason
) -> None:
    assert problem("http://127.0.0.1:1", login)[0] == reason


def test_which_keys_of_a_secret_are_too_long() -> None:
    assert problem("http://127.0.0.1:1", Credentials("me", "p" * 2**20))[1] == (
        "the username and the password for MLflow at http://127.0.0.1:1 are too long: correct MLFLOW_TRACKING_USERNAME and "
        "MLFLOW_TRACKING_PASSWORD in the Secret in spec.tracking.secretRef"
    )


def test_a_username_with_a_colon() -> None:
    assert problem("http://127.0.0.1:1", Credentials("a:b", "c")) == (
        ConditionReason.CREDENTIALS_UNREADABLE,
        "the username for MLflow at http://127.0.0.1:1 contains a colon, which HTTP does not allow: correct MLFLOW_TRACKING_USERNAME in "
        "the Secret in spec.tracking.secretRef",
    )


NO_ACCESS = "MLflow at {uri} refuses access: check the Secret in spec.tracking.secretRef ({why})"
NO_MLFLOW = (
    "{uri} does not respond like an MLflow server: check the address, and whether a login page or a proxy "
    "intercepts requests ({why})"
)
REFUSALS: dict[str, tuple[int, str | Json, ConditionReason, str]] = {
    "its host check": (
        403,
        "Invalid Host header - possible DNS rebinding attack detected",
        ConditionReason.MLFLOW_HOST_NOT_ALLOWED,
        "MLflow at {uri} rejects the host name in its own address (403): add '{host}' to its --allowed-hosts "
        "(MLFLOW_SERVER_ALLOWED_HOSTS)",
    ),
    "no credentials": (
        401,
        "You are not authenticated",
        ConditionReason.MLFLOW_FORBIDDEN,
        NO_ACCESS.replace("{why}", "HTTP 401"),
    ),
    "no permission, in words": (
        403,
        "Permission denied",
        ConditionReason.MLFLOW_FORBIDDEN,
        NO_ACCESS.replace("{why}", "HTTP 403"),
    ),
    "no permission, in MLflow's own form": (
        403,
        {"error_code": "PERMISSION_DENIED", "message": "not yours"},
        ConditionReason.MLFLOW_FORBIDDEN,
        NO_ACCESS.replace("{why}", "PERMISSION_DENIED, HTTP 403"),
    ),
    "it broke": (
        500,
        "oops",
        ConditionReason.MLFLOW_ERROR,
        "MLflow at {uri} failed at experiments/get-by-name (HTTP 500): read the log of the server",
    ),
    "a proxy without MLflow": (
        502,
        "bad gateway",
        ConditionReason.MLFLOW_UNREACHABLE,
        "MLflow at {uri} cannot be reached: HTTP 502",
    ),
    "it is busy": (
        429,
        "slow down",
        ConditionReason.MLFLOW_UNREACHABLE,
        "MLflow at {uri} cannot be reached: HTTP 429",
    ),
    "another server": (404, HTML, ConditionReason.MLFLOW_ERROR, NO_MLFLOW.replace("{why}", "HTTP 404")),
    "a login page": (
        200,
        HTML,
        ConditionReason.MLFLOW_ERROR,
        NO_MLFLOW.replace("{why}", "the response is not JSON"),
    ),
    "JSON of another server": (
        200,
        {"kind": "Secret", "data": {"password": "aW5zaWRl"}},
        ConditionReason.MLFLOW_ERROR,
        NO_MLFLOW.replace("{why}", "the response has an unexpected format"),
    ),
    "an experiment that is a text": (
        200,
        {"experiment": "inside"},
        ConditionReason.MLFLOW_ERROR,
        NO_MLFLOW.replace("{why}", "the response has an unexpected format"),
    ),
    "nested without end": (
        200,
        "[" * 100_000,
        ConditionReason.MLFLOW_ERROR,
        NO_MLFLOW.replace("{why}", "the response is not JSON"),
    ),
    "another server's refusal": (
        400,
        {"error_code": "password=inside", "message": "inside"},
        ConditionReason.MLFLOW_ERROR,
        "MLflow at {uri} failed at experiments/get-by-name (HTTP 400): read the log of the server",
    ),
    "a bad request": (
        400,
        {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such filter"},
        ConditionReason.MLFLOW_REFUSED,
        "MLflow at {uri} refuses experiments/get-by-name (INVALID_PARAMETER_VALUE, HTTP 400): see the log of the operator for the reason",
    ),
}


@pytest.mark.parametrize(("code", "body", "reason", "message"), REFUSALS.values(), ids=REFUSALS)
def test_a_failure_becomes_a_sentence(
    mlflow: Answers, code: int, body: str | Json, reason: ConditionReason, message: str
) -> None:
    mlflow.default = (code, body)
    host = mlflow.uri.removeprefix("http://")
    assert problem(mlflow.uri) == (reason, message.format(uri=mlflow.uri, host=host))


def test_the_codes_that_the_client_tells_apart_are_known() -> None:
    """It reads any other code as none."""
    assert {client.MISSING, client.EXISTS, *client._FORBIDDEN_CODES, *client._REFUSED_CODES} <= PROTOCOL_CODES


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with counted("finetune_operator_requests") as changes:
            assert problem(uri) == (
                ConditionReason.MLFLOW_UNREACHABLE,
                f"MLflow at {uri} cannot be reached: the connection failed",
            )
        assert changes == {"_total MLflow none": 1}


def test_a_server_that_hangs_up_is_unreachable() -> None:
    with accepting(lambda connection: connection.recv(65536)) as uri:
        assert problem(uri) == (
            ConditionReason.MLFLOW_UNREACHABLE,
            f"MLflow at {uri} cannot be reached: the connection failed",
        )


def test_a_host_name_that_does_not_exist_is_unreachable() -> None:
    assert problem("http://mlflow.invalid:5000") == (
        ConditionReason.MLFLOW_UNREACHABLE,
        "MLflow at http://mlflow.invalid:5000 cannot be reached: the connection failed",
    )


def test_a_redirect_is_not_followed() -> None:
    with serving(lambda _: Answer(200, {"experiment": "inside"})) as inside:

        def redirect(request: Request) -> Answer:
            return Answer(307, "", {"Location": inside + request.target})

        with serving(redirect) as uri:
            assert problem(uri) == (
                ConditionReason.MLFLOW_ERROR,
                f"MLflow at {uri} redirects requests, and the operator does not follow redirects: check whether a "
                "login page intercepts requests, and use the final address in tracking.uri of the chart, or in a "
                "resource with another name (HTTP 307)",
            )


def test_an_answer_of_any_size_takes_no_memory(mlflow: Answers) -> None:
    mlflow.default = (200, "x" * (8 * 2**20))
    assert problem(mlflow.uri) == (
        ConditionReason.MLFLOW_ERROR,
        NO_MLFLOW.format(uri=mlflow.uri, why="the response is larger than 4194304 bytes"),
    )


@pytest.mark.parametrize("character", ["\x00", "\x01", "\r", "\n", "\x7f"])
async def test_a_token_that_cannot_be_sent_does_not_block_the_server(mlflow: Answers, character: str) -> None:
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": [RUN]})
    outages = Outages(lambda: 0.0, 10)
    with pytest.raises(ExternalError) as raised:
        await outages.ask(mlflow.uri, lambda: ask(mlflow.uri, Credentials(token=f"to{character}ken")))
    assert raised.value.problem.reason == ConditionReason.CREDENTIALS_UNREADABLE
    assert await outages.ask(mlflow.uri, lambda: ask(mlflow.uri)) == FOUND


async def test_an_answer_that_is_too_large_does_not_block_the_server(mlflow: Answers) -> None:
    outages = Outages(lambda: 0.0, 10)
    mlflow.default = (200, "x" * (8 * 2**20))
    with pytest.raises(ExternalError):
        await outages.ask(mlflow.uri, lambda: ask(mlflow.uri))
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": [RUN]})
    assert await outages.ask(mlflow.uri, lambda: ask(mlflow.uri)) == FOUND


def test_a_drip_ends_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded, "TIMEOUT_SECONDS", 0.5)

    def drip(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
            while True:
                connection.sendall(b" ")
                time.sleep(0.05)

    with accepting(drip) as uri:
        assert problem(uri) == (
            ConditionReason.MLFLOW_UNREACHABLE,
            f"MLflow at {uri} cannot be reached: no response within 0.5 s",
        )


def test_what_mlflow_says_is_in_the_log_alone(mlflow: Answers, caplog: pytest.LogCaptureFixture) -> None:
    answer = {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such filter as s3cr3t"}
    mlflow.default = (400, answer)
    _, message = problem(mlflow.uri, Credentials(token="s3cr3t"))
    assert "filter" not in message
    assert [record.getMessage() for record in caplog.records] == [
        f"MLflow at {mlflow.uri} refuses experiments/get-by-name (INVALID_PARAMETER_VALUE, HTTP 400): no such filter as ***"
    ]


def test_credentials_never_show() -> None:
    unusable = Credentials(token="s3cr3t\ntoken")
    assert "s3cr3t" not in repr(unusable)
    with answering() as answers, pytest.raises(ExternalError) as raised:
        ask(answers.uri, unusable)
    assert "s3cr3t" not in str(raised.value)
    assert raised.value.__cause__ is None


HEADERS: dict[str, tuple[Credentials, str | None]] = {
    "anonymous": (Credentials(), None),
    "basic": (Credentials("me", "pass"), f"Basic {base64.b64encode(b'me:pass').decode()}"),
    "token": (Credentials(token="t"), "Bearer t"),
}


@pytest.mark.parametrize(("credentials", "expected"), HEADERS.values(), ids=HEADERS)
def test_each_call_takes_the_jobs_own_credentials(
    mlflow: Answers, credentials: Credentials, expected: str | None
) -> None:
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": []})
    assert ask(mlflow.uri, credentials) is None
    assert mlflow.authorization == expected


EXPERIMENT: Json = {
    "experiment": {"experiment_id": "7", "name": "team", "artifact_location": "", "lifecycle_stage": "active"}
}
TAG: Json = {"key": "finetune.dev/checkpoint-error", "value": "no space is left"}
RUN: Json = {
    "info": {"run_id": "r1", "run_uuid": "r1", "experiment_id": "7", "status": "RUNNING"},
    "data": {
        "metrics": [{"key": "loss", "value": 2.5, "timestamp": 1, "step": 3}],
        "tags": [TAG],
        "params": [{"key": "max_steps", "value": "100"}],
    },
}
FOUND = Run("r1", "7", "RUNNING", {"loss": 2.5}, {TAG["key"]: TAG["value"]}, {"loss": 3}, 100)
ABSENT: Json = {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "gone"}


def test_a_run_is_found_by_its_id_in_one_call(mlflow: Answers) -> None:
    mlflow.by_path["runs/get"] = (200, {"run": RUN})
    assert Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1") == FOUND
    assert mlflow.asked == [("GET", "runs/get")]


def test_runs_are_found_together_by_their_ids(mlflow: Answers) -> None:
    mlflow.by_path["runs/search"] = (200, {"runs": [RUN]})
    server = Server(mlflow.uri, mlflow.uri)
    assert server.find_runs({"r1": "7", "r2": "8"}) == {"r1": FOUND}
    assert mlflow.asked == [("POST", "runs/search")]
    mlflow.by_path["runs/search"] = (200, {"runs": [DELETED_RUN]})
    assert server.find_runs({"r1": "7"}) == {}


def test_runs_that_are_too_large_together_are_asked_for_in_halves(
    mlflow: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    searches: list[str] = []
    too_large = LargeAnswerError(Problem(ConditionReason.MLFLOW_ERROR, "too large"))

    def search(_client: Client, _path: str, **fields: Any) -> Json:
        searches.append(fields["filter"])
        if fields["max_results"] > 1 or "r3" in fields["filter"]:
            raise too_large
        run_id = fields["filter"].split("'")[1]
        return {"runs": [{**RUN, "info": {**RUN["info"], "run_id": run_id}}]}

    monkeypatch.setattr(Client, "search", search)
    server = Server(mlflow.uri, mlflow.uri)
    assert sorted(server.find_runs({"r1": "7", "r2": "7"})) == ["r1", "r2"]
    ids = ("'r1','r2'", "'r1'", "'r2'")
    assert searches == [f"attributes.run_id IN ({item})" for item in ids]
    with pytest.raises(LargeAnswerError):
        server.find_runs({"r3": "7"})


@pytest.mark.parametrize(("largest_page", "sizes"), [(100, [100]), (99, [100, 5])])
def test_open_runs_are_searched_in_smaller_pages_where_they_are_large(
    mlflow: Answers, monkeypatch: pytest.MonkeyPatch, largest_page: int, sizes: list[int]
) -> None:
    page_sizes: list[int] = []

    def search(_client: Client, path: str, **fields: Any) -> Json:
        if path == "experiments/search":
            return {"experiments": [{"experiment_id": "7"}]}
        page_sizes.append(fields["max_results"])
        if fields["max_results"] > largest_page:
            raise LargeAnswerError(Problem(ConditionReason.MLFLOW_ERROR, "too large"))
        return {"runs": [RUN]}

    monkeypatch.setattr(Client, "search", search)
    assert Server(mlflow.uri, mlflow.uri).find_open_runs("tag") == [FOUND]
    assert page_sizes == sizes


@pytest.mark.parametrize("written", ["-1", "0", "", "ten", "1e3"])
def test_a_parameter_max_steps_that_is_no_number_of_steps_is_none(mlflow: Answers, written: str) -> None:
    data = {**RUN["data"], "params": [{"key": "max_steps", "value": written}]}
    mlflow.by_path["runs/get"] = (200, {"run": {**RUN, "data": data}})
    run = Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1")
    assert run
    assert run.planned_steps is None


def test_a_run_is_found_by_its_tag_in_its_own_experiment(mlflow: Answers) -> None:
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": [RUN]})
    assert ask(mlflow.uri) == FOUND
    assert [path for _, path in mlflow.asked] == ["experiments/get-by-name", "runs/search"]


def test_a_run_that_the_server_lost_is_looked_for_by_its_tag(mlflow: Answers) -> None:
    mlflow.by_path["runs/get"] = (404, ABSENT)
    mlflow.by_path["experiments/get-by-name"] = (404, ABSENT)
    assert Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1") is None


DELETED_RUN: Json = {**RUN, "info": {**RUN["info"], "lifecycle_stage": "deleted"}}


@pytest.mark.parametrize(
    ("other_runs", "run_id"), [([], "r1"), ([{**RUN, "info": {**RUN["info"], "run_id": "r2"}}], "r2")]
)
def test_a_run_that_was_deleted_gives_way_to_another(
    mlflow: Answers, other_runs: list[Json], run_id: str
) -> None:
    mlflow.by_path["runs/get"] = (200, {"run": DELETED_RUN})
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": other_runs})
    run = Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1")
    assert run
    assert (run.run_id, run.is_deleted) == (run_id, not other_runs)


def test_a_run_is_not_made_twice(mlflow: Answers) -> None:
    mlflow.by_path["experiments/get-by-name"] = (200, EXPERIMENT)
    mlflow.by_path["runs/search"] = (200, {"runs": [RUN]})
    assert Server(mlflow.uri, mlflow.uri).ensure_run("u1", "team", "tune", {}) == FOUND
    assert "runs/create" not in {path for _, path in mlflow.asked}


def test_a_run_in_an_experiment_with_a_known_id_takes_two_requests(mlflow: Answers) -> None:
    mlflow.by_path["runs/search"] = (200, {"runs": []})
    mlflow.by_path["runs/create"] = (200, {"run": RUN})
    assert Server(mlflow.uri, mlflow.uri).ensure_run("u1", "team", "tune", {}, "e1") == FOUND
    assert [path for _, path in mlflow.asked] == ["runs/search", "runs/create"]


def test_an_experiment_whose_known_id_is_refused_is_read_again(mlflow: Answers) -> None:
    mlflow.by_path["runs/search"] = (200, {"runs": []})
    mlflow.by_path["runs/create"] = (400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "not active"})
    deleted = {**EXPERIMENT["experiment"], "lifecycle_stage": "deleted"}
    mlflow.by_path["experiments/get-by-name"] = (200, {"experiment": deleted})
    with pytest.raises(ExternalError, match="experiment team was deleted in MLflow"):
        Server(mlflow.uri, mlflow.uri).ensure_run("u1", "team", "tune", {}, "e1")


def test_an_experiment_that_was_deleted_is_named(mlflow: Answers) -> None:
    deleted = {**EXPERIMENT["experiment"], "lifecycle_stage": "deleted"}
    mlflow.by_path["experiments/get-by-name"] = (200, {"experiment": deleted})
    mlflow.by_path["runs/search"] = (200, {"runs": []})
    with pytest.raises(ExternalError) as raised:
        Server(mlflow.uri, mlflow.uri).ensure_run("u1", "team", "tune", {})
    assert str(raised.value) == (
        "experiment team was deleted in MLflow: restore the experiment, or create a FineTuneJob with another name "
        "and another spec.tracking.experiment"
    )


def version(number: str, name: str = "it's mine", status: str = "READY") -> Json:
    return {"name": name, "version": number, "status": status, "run_id": "r1"}


def test_the_newest_version_of_a_run_counts_and_the_aliases_at_it(mlflow: Answers) -> None:
    versions = [
        version("9"),
        version("10"),
        version("11", "other"),
        version("12", status="FAILED_REGISTRATION"),
    ]
    versions[1]["tags"] = [{"key": "eval_f1", "value": "0.5"}]
    mlflow.by_path["model-versions/search"] = (200, {"model_versions": versions})
    aliases = [{"alias": "candidate", "version": "10"}, {"alias": "champion", "version": "9"}]
    model = {"registered_model": {"name": "it's mine", "aliases": aliases}}
    mlflow.by_path["registered-models/get"] = (200, model)
    registry = MlflowRegistry("http://127.0.0.1:1", mlflow.uri)
    assert registry.find_version("it's mine", "r1", ["candidate", "champion"]) == RegisteredVersion(
        "it's mine", "10", frozenset({"candidate"}), {"eval_f1": "0.5"}
    )


WRONG_VERSIONS = ["", "ten", "-1", "1.0", " 1", "1_0", "\u0661", "1" * 5000, None]


@pytest.mark.parametrize("number", WRONG_VERSIONS)
@pytest.mark.parametrize("path", ["registered-models/get", "model-versions/get", "model-versions/search"])
def test_a_version_that_is_no_number(mlflow: Answers, path: str, number: str | None) -> None:
    item = {**version("1", "m"), "version": number}
    mlflow.by_path = {
        "registered-models/get": (
            200,
            {"registered_model": {"aliases": [{"alias": "a", "version": number}]}},
        ),
        "model-versions/get": (200, {"model_version": {**item, "run_id": ""}}),
        "model-versions/search": (200, {"model_versions": [item]}),
    }
    registry = MlflowRegistry(mlflow.uri, mlflow.uri)
    calls: dict[str, Callable[[], object]] = {
        "registered-models/get": lambda: registry.model("m"),
        "model-versions/get": lambda: registry.version("m", "1"),
        "model-versions/search": lambda: registry.find_version("m", "r1", []),
    }
    with pytest.raises(ExternalError) as raised:
        calls[path]()
    assert str(raised.value) == NO_MLFLOW.format(uri=mlflow.uri, why="the response has an unexpected format")


def test_no_version_yet(mlflow: Answers) -> None:
    mlflow.by_path["model-versions/search"] = (200, {"model_versions": []})
    assert MlflowRegistry(mlflow.uri, mlflow.uri).find_version("m", "r1", []) is None


WRONG_IDS = ["", "r 1", "../runs", "password=inside", "r" * 257]


@pytest.mark.parametrize("run_id", WRONG_IDS)
def test_an_id_that_mlflow_does_not_allow_is_not_shown(mlflow: Answers, run_id: str) -> None:
    mlflow.by_path["runs/get"] = (200, {"run": {**RUN, "info": {**RUN["info"], "run_id": run_id}}})
    with pytest.raises(ExternalError) as raised:
        Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1")
    assert str(raised.value) == NO_MLFLOW.format(uri=mlflow.uri, why="the response has an unexpected format")


def test_metrics_that_are_no_numbers(mlflow: Answers) -> None:
    metrics = [{"key": key, "value": key, "step": "2"} for key in ("NaN", "Infinity", "-Infinity")]
    mlflow.by_path["runs/get"] = (200, {"run": {**RUN, "data": {"metrics": metrics}}})
    run = Server(mlflow.uri, mlflow.uri).find_run("u1", "team", "r1")
    assert run
    assert {key: str(value) for key, value in run.metrics.items()} == {
        "NaN": "nan",
        "Infinity": "inf",
        "-Infinity": "-inf",
    }
    assert run.steps == {"NaN": 2, "Infinity": 2, "-Infinity": 2}


def test_pages_of_versions_are_read_to_the_end_and_not_without_end(mlflow: Answers) -> None:
    mlflow.by_path["model-versions/search"] = (
        200,
        {"model_versions": [version("1", "m")], "next_page_token": "t"},
    )
    mlflow.by_path["registered-models/get"] = (200, {"registered_model": {"name": "m"}})
    newest = MlflowRegistry(mlflow.uri, mlflow.uri).find_version("m", "r1", [])
    assert newest == RegisteredVersion("m", "1")
    assert mlflow.asked.count(("GET", "model-versions/search")) == 10


def test_open_runs_are_read_to_the_end_and_not_without_end(mlflow: Answers) -> None:
    mlflow.by_path["experiments/search"] = (
        200,
        {"experiments": [{"experiment_id": "1"}], "next_page_token": "t"},
    )
    mlflow.by_path["runs/search"] = (200, {"runs": []})
    assert Server(mlflow.uri, mlflow.uri).find_open_runs("tag") == []
    assert mlflow.asked.count(("POST", "experiments/search")) == 100
