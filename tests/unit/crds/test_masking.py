"""Credentials in texts of other programs."""

from __future__ import annotations

import base64
import json
import string
import time
from collections.abc import Callable
from urllib.parse import quote, quote_plus

import pytest

from finetune_crds.masking import find_secrets, mask, mask_recognized

SECRETS = ["s3cr3t/+ü\"\\'& x", "dapi0123456789abcdef", "päss\nword", "a+b=c/d", "hunter22"]
FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "repr": repr,
    "JSON": json.dumps,
    "JSON of text beyond ASCII": lambda secret: json.dumps(secret, ensure_ascii=False),
    "URL": lambda secret: quote(secret, safe=""),
    "URL with slashes": quote,
    "form": quote_plus,
    "URL with lowercase codes": lambda secret: "".join(f"%{byte:02x}" if chr(byte) not in string.ascii_letters + string.digits + "_.-~" else chr(byte) for byte in secret.encode()),
    "base64": lambda secret: base64.b64encode(secret.encode()).decode(),
    "base64 without padding": lambda secret: base64.b64encode(secret.encode()).decode().rstrip("="),
    "base64 for URLs": lambda secret: base64.urlsafe_b64encode(secret.encode()).decode(),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("secret", SECRETS)
def test_every_form_is_masked(form: Callable[[str], str], secret: str) -> None:
    masked = mask(f"before {form(secret)} after", [secret])
    assert masked.strip("\"'").replace('"', "").replace("'", "").rstrip("=") == "before *** after"


@pytest.mark.parametrize("user", ["", "u", "us", "use", "user", "a much longer name"])
@pytest.mark.parametrize("after", ["", "x", "xy"])
def test_basic_authorization_is_masked(user: str, after: str) -> None:
    secret = "correct-horse-battery"
    encoded = base64.b64encode(f"{user}:{secret}{after}".encode()).decode()
    masked = mask(f"Authorization {encoded}", [secret])
    assert "***" in masked
    left = masked.removeprefix("Authorization ").split("***")
    assert sum(map(len, left)) <= len(encoded) - len(secret) * 4 // 3 + 3


def test_a_short_secret_leaves_a_text_readable() -> None:
    """A token of one letter masked all of it, and so showed the token, too."""
    text = "Databricks at https://e.example cannot be reached: the request timed out (e)"
    assert (
        mask(text, ["e"])
        == "Databricks at https://***.example cannot be reached: the request timed out (***)"
    )
    assert mask(text, ["\n", "", " "]) == text
    assert mask("abcdef abcde xabcdex", ["abcde"]) == "abcdef *** xabcdex"


def test_the_longest_form_is_masked_first() -> None:
    assert mask("secret-1-and-more secret-1", ["secret-1", "secret-1-and-more"]) == "*** ***"


RECOGNIZED = {
    "git clone https://me:pa55word@host/a.git": "git clone https://me:***@host/a.git",
    "Authorization: Bearer abcdefgh.ijkl": "Authorization: Bearer ***",
    "Authorization: Basic dXNlcjpwYXNz==": "Authorization: Basic ***",
    f"token hf_{'a' * 30} is refused": "token *** is refused",
    "dapi0123456789abcdef0123456789abcdef": "***",
    "key AKIA0123456789ABCDEF": "key ***",
    'HF_TOKEN="abcdefgh"': 'HF_TOKEN="***"',
    "{'token': 'abcdefgh'}": "{'token': '***'}",
    "PASSWORD = abcdefgh!, x": "PASSWORD = ***, x",
    '{"password": "abcdefgh", "a": 1}': '{"password": "***", "a": 1}',
    "?sv=1&sig=x&access_key=abcdefgh&b=c": "?sv=1&sig=x&access_key=***&b=c",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----",
    "-----BEGIN PRIVATE KEY-----\nMIIE": "-----BEGIN PRIVATE KEY-----***",
    "eyJhbGciOiJIUzI1.eyJzdWIiOiIxMjM0.abc": "***",
    "https://u:p@ss@h/a": "https://u:***@h/a",
    '"https://u:p@h","x@y"': '"https://u:***@h","x@y"',
    "password: hunter22": "password: ***",
    "db:\n  api_key: 'abc-123'\n": "db:\n  api_key: '***'\n",
    "https://s3/a?X-Amz-Signature=abcd1234ef&X-Amz-Date=1": "https://s3/a?X-Amz-Signature=***&X-Amz-Date=1",
    "https://a.blob/c?sv=1&sig=abcdef&se=2": "https://a.blob/c?sv=1&sig=***&se=2",
    "sig=ab%2Bcd&se=2": "sig=***&se=2",
    "the key sk-proj-abcdefghij0123456789 is wrong": "the key *** is wrong",
    "Bearer dXNlcjpwYXNz is refused": "Bearer *** is refused",
    "Basic abcdefgh0 is refused": "Basic *** is refused",
    "token=12345678abc": "token=***",
    "password=12345678": "password=***",
}


@pytest.mark.parametrize(("text", "masked"), RECOGNIZED.items())
def test_what_looks_like_a_credential_is_masked(text: str, masked: str) -> None:
    assert mask_recognized(text) == masked


@pytest.mark.parametrize(
    "text",
    [
        "the request timed out after 10 s",
        "https://host:8080/path?x=1",
        "tokens per second: 12345, max_tokens: 4096",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "the tokenizer has no pad token: set model.padToken",
        "ModuleNotFoundError: No module named 'flash_attn'",
        "check the Secret in spec.tracking.secretRef",
        "basic authentication is refused",
        "the tokenizer has no padding token: choose another model",
        "the server refuses the password: correct the Secret",
        "eos_token='</s>' pad_token=None",
        "max_tokens=4096, tokens=12345",
        "next_token=50257 is out of range",
        "    token = tokenizer.convert_ids_to_tokens(7)",
        "Bearer Authentication/SSO is required",
        "hidden_size, sk-learn-contrib-thing-long-name, SK-LEARN-CONTRIB-THING-LONG-NAME-1",
        "def f(sig=signature)",
        "imagePullSecret: regcred1 is not found",
    ],
)
def test_other_texts_stay_as_they_are(text: str) -> None:
    assert mask_recognized(text) == text


REPEATED = [
    "eyJ-", "eyJ-aaaaaaaa.", "eyJaaaaaaaa.eyJ", "sk-", "sk-a", "hf_", "xox", "xoxb-", "AIza-", "glpat-", "dapi", "dapi0", "gh", "github_pat_",
    "AKIA", "://a:", "://:x", "://:", "://a:b@", "@", "a@", "bearer ", "basic\n", "bearer aB ", "authorization: ", 'authorization" \n',
    "authorization: bearer ", "-----BEGIN ", "-----BEGIN A", "-----BEGIN PRIVATE KEY-----", "token ", "token", "token=", "token='", 'token"',
    "token=a.", "token=a(", "token=1", "token=1(", "password", "password:", "password: ", "password: a", "password=", "sig=", "?sig=",
    "X-Amz-", "X-Amz-Signature=", "token token=\"' ://a:b basic  bearer -----BEGIN ",
]  # fmt: skip
BEGINNINGS = [
    "://", "://:", "://a:", "://a:b@", "bearer ", "basic", "authorization", "authorization:", "authorization: bearer", "token", "token=", "token='",
    "token=a(", "password:", "password: ", "eyJ", "eyJaaaaaaaa.eyJ", "sk-", "hf_", "sig=", "-----BEGIN ",
]  # fmt: skip
ADVERSARIAL = [
    *((unit * (200_000 // len(unit))) for unit in REPEATED),
    *(beginning + character * 200_000 for beginning in BEGINNINGS for character in "a1 \n.@-"),
]


@pytest.mark.parametrize("text", ADVERSARIAL, ids=lambda text: repr(text[:30]))
def test_a_long_text_takes_no_time(text: str) -> None:
    # NB: where a search begins again at each character of a long word, such a text takes half a minute.
    begin = time.process_time()
    mask_recognized(text)
    assert time.process_time() - begin < 2


def test_many_secrets_in_a_long_text_take_no_time() -> None:
    assert len(mask("token token=\"' ://a:b basic  bearer -----BEGIN " * 4000, SECRETS)) > 0


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_credential_with_a_line_end_is_masked_without_it(form: Callable[[str], str]) -> None:
    masked = mask(f"before {form('päss/w0rd+1')} after", [" päss/w0rd+1\n"])
    assert masked.replace('"', "").replace("'", "").replace("=", "") == "before *** after"


@pytest.mark.parametrize("value", ["0", "1", "true", "False", "YES", "no", " 1\n"])
def test_a_switch_is_no_credential(value: str) -> None:
    assert find_secrets({"HF_HUB_DISABLE_IMPLICIT_TOKEN": value}) == []


def test_the_variables_with_credentials() -> None:
    environment = {
        "HF_TOKEN": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_ACCESS_KEY_ID": "-", "DATABRICKS_CLIENT_SECRET": "c", "PASSWORD": "d",
        "MLFLOW_TRACKING_PASSWORD": "e", "AWS_WEB_IDENTITY_TOKEN_FILE": "-", "WANDB_API_KEY": "f", "AZURE_STORAGE_KEY": "g",
        "AZURE_STORAGE_CONNECTION_STRING": "h", "TOKENIZERS_PARALLELISM": "-", "EMPTY_TOKEN": "", "GOOGLE_APPLICATION_CREDENTIALS": "-",
        "MINIO_SECRET_KEY": "i", "DB_PASS": "j", "SERVICE_CREDENTIALS": "k", "BYPASS": "-",
    }  # fmt: skip
    assert find_secrets(environment) == list("abcdefghijk")
