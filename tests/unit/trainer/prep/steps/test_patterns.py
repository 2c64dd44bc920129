"""What patterns find in texts, and what looks like it and stays."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from finetune_crds.cleaning import RedactKind
from finetune_trainer.prep.steps.patterns import PATTERNS, replace_values

# NB: keys in one piece would be found by the scanners that read this repository.
AWS, GITHUB = "AKIA" + "IOSFODNN7EXAMPLE", "ghp_" + "16C7e42F292c6912E7710c838347Ae178B4a"
JWT = "eyJhbGciOiJIUzI1NiJ9" + ".eyJzdWIiOiIxMjM0NTY3ODkwIn0" + ".dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
PEM = "-----BEGIN RSA PRIVATE " + "KEY-----\nMIIEpAIBAAKCAQEA7bq\nC+98=\n-----END RSA PRIVATE KEY-----"
OPENAI = "sk-" + "proj-Ab3dEf9hIjKlMn0pQrStUv5xYz012345"

FOUND: dict[RedactKind, dict[str, str]] = {
    "Email": {
        "write to jane.doe+list@mail.example.co.uk.": "write to <EMAIL>.",
        "From: <a_b@example.com>, c@example.org": "From: <<EMAIL>>, <EMAIL>",
        "mailto:jane@example.com?subject=x": "mailto:<EMAIL>?subject=x",
        "\u8054\u7cfbabc@example.com\u8c22\u8c22": "\u8054\u7cfb<EMAIL>\u8c22\u8c22",
        "Frau M\u00fcller (mueller@xn--mller-kva.de)": "Frau M\u00fcller (<EMAIL>)",
        "von m\u00fcller@b\u00fccher.de und mu\u0308ller@example.com": "von <EMAIL> und <EMAIL>",
        "a@gmail.com:hunter2": "<EMAIL>:hunter2",
    },
    "Phone": {
        "call +49 30 1234567 now": "call <PHONE> now",
        "+44 (0)20 7946 0958, or +14155552671.": "<PHONE>, or <PHONE>.",
        "phone=+86 138 0013 8000, https://wa.me/+4915112345678": "phone=<PHONE>, https://wa.me/<PHONE>",
        "(415) 555-2671 or 415-555-2671 or 415.555.2671": "<PHONE> or <PHONE> or <PHONE>",
        "(415) 555 2671, phone: 415 555 2671 or Mobile 4155552671": "<PHONE>, phone: <PHONE> or Mobile <PHONE>",
        "Tel.: 030 / 1234567, Fax 030 1234568": "Tel.: <PHONE>, Fax <PHONE>",
        "t\u00e9l: 01 42 68 53 00; Phone number: (0171) 1234567": "t\u00e9l: <PHONE>; Phone number: <PHONE>",
        **{
            f"{label}: 030 1234567": f"{label}: <PHONE>"
            for label in (
                "Telefon",
                "TELEPHONE",
                "teléfono",
                "téléphone",
                "telefono",
                "Mobil",
                "mobile",
                "Handy",
                "cell",
                "WhatsApp",
            )
        },
    },
    "CardNumber": {
        "4111 1111 1111 1111 expires 12/27": "<CARD_NUMBER> expires 12/27",
        "4111 1111 1111 1111 12/27 or 4111111111111111,12": "<CARD_NUMBER> 12/27 or <CARD_NUMBER>,12",
        "card 5555-5555-5555-4444, 378282246310005": "card <CARD_NUMBER>, <CARD_NUMBER>",
        "3782 822463 10005; 6011111111111117; 30569309025904": "<CARD_NUMBER>; <CARD_NUMBER>; <CARD_NUMBER>",
        "2223003122003222.": "<CARD_NUMBER>.",
    },
    "Secret": {
        f"export AWS_ACCESS_KEY_ID={AWS}": "export AWS_ACCESS_KEY_ID=<SECRET>",
        f'aws_secret_access_key = "{"wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"}"': 'aws_secret_access_key = "<SECRET>"',
        f"token {GITHUB}, {'github_pat_' + '11ABCDEFG0123456789abc'}": "token <SECRET>, <SECRET>",
        f'api_key="{OPENAI}"': 'api_key="<SECRET>"',
        f"Authorization: Bearer {JWT}": "Authorization: Bearer <SECRET>",
        f"key:\n{PEM}\nend": "key:\n<SECRET>\nend",
        f"it begins with {PEM.splitlines()[0]} always": "it begins with <SECRET> always",
        f"{'xoxb' + '-2048-4096-a1b2c3d4e5f6g7h8'} {'AIza' + 'S' * 35} {'hf_' + 'aB3' * 12}": "<SECRET> <SECRET> <SECRET>",
        f'{{"SecretAccessKey": "{"wJalrXUtnFEMI/K7MDENG/" + "bPxRfiCYEXAMPLEKEY"}"}}': '{"SecretAccessKey": "<SECRET>"}',
        f"AccountName=a;AccountKey={'Zm9v' * 21}Zg==;": "AccountName=a;AccountKey=<SECRET>;",
        "postgres://app:s3cr3t@db:5432/orders": "postgres://app:<SECRET>@db:5432/orders",
        f"{'GOCSPX' + '-a1B2' * 5} {'ya29' + '.' + 'a0AfH6SM' * 4}": "<SECRET> <SECRET>",
        f"{'SG' + '.' + 'aB3_' * 5}.{'xY7-' * 10} {'hvs' + '.' + 'aB3x' * 24}": "<SECRET> <SECRET>",
        f"{'pypi' + '-AgEIcHlwaS5vcmc'}{'aB3_' * 20}": "<SECRET>",
        "a@gmail.com:hunter2\r\n b_c@mail.example.org:s3cr$t.2024 \nd@web.de:correct#": "a@gmail.com:<SECRET>\r\n "
        "b_c@mail.example.org:<SECRET> \nd@web.de:<SECRET>",
        "1,a@gmail.com:hunter2;b@web.de:hunter3\tc@web.de:hunter4| d@web.de:hunter5 |": "1,a@gmail.com:<SECRET>;"
        "b@web.de:<SECRET>\tc@web.de:<SECRET>| d@web.de:<SECRET> |",
        f"{'dapi' + '0123456789abcdef' * 2} {'glpat-' + 'x1Y2' * 5} {'sk_' + 'live_4eC39HqLyjWDarjt'}": "<SECRET> <SECRET> <SECRET>",
    },
}


@pytest.mark.parametrize("kind", FOUND)
def test_what_is_found(kind: RedactKind) -> None:
    assert {text: replace_values(text, PATTERNS[kind])[0] for text in FOUND[kind]} == FOUND[kind]


@pytest.mark.parametrize("kind", FOUND)
def test_each_placeholder_counts_once_and_stays_when_the_text_is_read_again(kind: RedactKind) -> None:
    pattern = PATTERNS[kind]
    for text, redacted in FOUND[kind].items():
        assert replace_values(text, pattern)[1] == redacted.count(pattern.placeholder)
        assert replace_values(redacted, pattern) == (redacted, 0)


# What no pattern may touch.
STAYS = {
    "versions": "numpy 1.26.4, 2.13.0+cpu, Windows 10.0.19045.3803, lodash@4.17.21, v2024.11.22",
    "ISBN and ISSN": "ISBN 978-3-16-148410-0, 0-306-40615-2, 9783161484100, ISSN 2049-3630",
    "EAN": "4006381333931 5901234123457",
    "long numbers whose check digit is wrong": "4111 1111 1111 1112, 5555555555554445, 378282246310006",
    "numbers with a check digit that no network issues": "1234567812345670, 9999999999999995, 0000 0000 0000 0000",
    "IMEI": "490154203237518 356938035643809",
    "times since the epoch": "1700000000 1700000000000 1700000000000000 1700000000000000000",
    "floats": "0.4111111111111111 3.141592653589793 2.718281828459045e+10 1e-0712345678",
    "parts of longer numbers": "94111111111111111, 4111111111111111999999, 12-4111111111111111-4, x4111111111111111, "
    "4111 1111 1111 1111 4111, 1234 4111 1111 1111 1111, 4111111111111111.5",
    "dates and times": "2026-11-22T20:48:31.123456+01:00, 22.11.2026 20:48, 11/22/2026, 20261122-204831, UTC+02:00, +0100",
    "addresses of machines": "192.168.100.200:8080, 10.0.0.0/8, 255.255.255.255, 2001:0db8:85a3::8a2e:0370:7334, 00:1A:2B:3C:4D:5E",
    "amounts": "+12,345,678 EUR; +10 000 000; 1 234 567 890; $1,234,567.89; +100%; 415 555 2671 items; -1234567890; +35236450.6",
    "IBAN and tax numbers": "DE89 3704 0044 0532 0130 00, 123-45-6789, 12/345/67890",
    "hashes": "d41d8cd98f00b204e9800998ecf8427e 0de00d1 4c7e42F292c6912E7710c838347Ae178B4a 9b74c9897bac770ffc029102a200c5de",
    "UUID": "123e4567-e89b-12d3-a456-426614174000",
    "arithmetic": "x=a+14155552671 y=1+4155552671 c++11 2014 2017 2020, f(+1, +2), 200-300-4000-5000",
    "decorators, products and handles": "@app.route('/'), q@k.transpose(-2, -1), (a@b.sum()), @octocat, user@localhost, a @ b.c",
    "passwords of examples": "postgres://user:password@localhost, https://$USER:$PASSWORD@example.org, redis://:<key>@host",
    "accounts of servers in commands": "scp model.bin root@gpu.example.com:model-v2.bin\n"
    "rsync -a user@server.example.com:backup_1 .\ngit clone deploy@git.example.com:infra-tools",
    "accounts of Git servers": "git clone git@github.com:team/code.git; pip install pkg@git+https://x.org/a",
    "images at twice their size": "logo@2x.png icon@3x.jpg",
    "names like keys": "sk-toggleable__content-arrow-right sk-estimator-doc-link-2024 sk-learn task-manager-of-the-year-2024 AKIA ASIA",
    "variables like keys": "hf_hub_download(repo) hf_home npm_config_registry ghp_token = os.environ dapi_client xox eyJ",
    "base64": "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    "public keys": "-----BEGIN PUBLIC KEY-----\nMIIBIjANBg\n-----END PUBLIC KEY----- -----BEGIN CERTIFICATE-----",
    "words of phones": "phone 12, mobile 2023, tel: 112, fax machine, cell 0.5, telephone 0x1234567",
    "code": "rgb(255, 255, 255); 0xDEADBEEF; 1_000_000_000; range(1000000000, 2000000000); id-555-0100-1234; [4, 5, 6]",
}


# Lines in which an address is followed by no password.
NO_PASSWORDS = (
    "scp model.bin root@gpu.example.com:model-v2.bin",
    "root@gpu.example.com:model-v2.bin",
    "root@gpu.example.com:model2.safetensors",
    "rsync -a user@server.example.com:backup_1 .",
    "rsync -a . user@server.example.com:backup_1",
    "git clone deploy@git.example.com:infra-tools",
    "deploy@git.example.com:infra-tools",
    "git@git.example.com:infra2tools",
    "Mail joe@example.com:out-of-office today",
    "joe@example.com:room101 is free",
)


@pytest.mark.parametrize("text", NO_PASSWORDS)
def test_what_follows_an_address_in_a_command_or_a_sentence_stays(text: str) -> None:
    assert replace_values(text, PATTERNS["Secret"]) == (text, 0)


@pytest.mark.parametrize("text", STAYS.values(), ids=STAYS)
def test_what_stays(text: str) -> None:
    assert {kind: replace_values(text, pattern)[0] for kind, pattern in PATTERNS.items()} == dict.fromkeys(
        PATTERNS, text
    )


def test_every_text_in_which_something_is_found_has_the_hint() -> None:
    """Without it, the text would not be looked at."""
    for kind, texts in FOUND.items():
        hinted = pc.match_substring_regex(pa.array(texts), PATTERNS[kind].hint)
        assert [
            text for text, is_hinted in zip(texts, hinted.to_pylist(), strict=True) if not is_hinted
        ] == []


def test_a_long_text_takes_no_long_time() -> None:
    """The repeated parts of the patterns do not multiply."""
    for text in (
        "a" * 200_000,
        "1" * 200_000,
        "1 " * 100_000,
        "a@" * 100_000,
        "a." * 100_000,
        "+1" * 100_000,
        "eyJa." * 40_000,
    ):
        for pattern in PATTERNS.values():
            assert replace_values(text, pattern) == (text, 0)
