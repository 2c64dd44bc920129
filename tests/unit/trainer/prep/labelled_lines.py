"""500 labelled lines of what redaction meets: 280 with values, in the shapes in which people paste them, and 220 with what looks like one.

A line is text with marked values, such as `call [[Phone|+49 30 1234567]] now`. Values are made from a seed: keys in the text of
this file would be found by the scanners that read the repository.
"""

from __future__ import annotations

import base64
import random
import string
from typing import TYPE_CHECKING, NamedTuple

import phonenumbers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
URL_SAFE = LETTERS + "-_"


class Line(NamedTuple):
    """A line, and the kinds and places of the values in it."""

    text: str
    values: frozenset[tuple[str, int, int]]


def lines() -> list[Line]:
    """Return the lines, always the same ones."""
    chance = random.Random(23)  # noqa: S311
    shapes = [*_with_values(chance)]
    marked = [shapes[number % len(shapes)]() for number in range(280)]
    plain = [_LOOK_ALIKES[number % len(_LOOK_ALIKES)] for number in range(220)]
    return [_parse(text) for text in (*marked, *(_filled(text, chance) for text in plain))]


def _parse(marked: str) -> Line:
    text, values = "", set()
    for number, piece in enumerate(marked.replace("]]", "[[").split("[[")):
        if number % 2:
            kind, _, value = piece.partition("|")
            values.add((kind, len(text), len(text) + len(value)))
            text += value
        else:
            text += piece
    return Line(text, frozenset(values))


def _filled(text: str, chance: random.Random) -> str:
    """Replace each # by a digit and each ~ by a letter of a hash."""
    filled = "".join(
        str(chance.randrange(10)) if letter == "#" else chance.choice(HEX) if letter == "~" else letter
        for letter in text
    )
    return filled.replace("{word}", chance.choice(("alpha", "orders", "report", "total")))


def _with_values(chance: random.Random) -> Iterator[Callable[[], str]]:
    def some(alphabet: str, length: int) -> str:
        return "".join(chance.choices(alphabet, k=length))

    def person() -> str:
        return chance.choice(
            (
                "jane.doe",
                "j_smith99",
                "m\u00fcller",
                "ren\u00e9e.dupont",
                "bj\u00f6rk+news",
                "o'neill"[2:],
                "\u043f\u0435\u0442\u0440\u043e\u0432",
                "mu\u0308ller",
            )
        )

    def mail() -> str:
        host = chance.choice(("gmail.com", "mail.example.co.uk", "m\u00fcller-bau.de", "web.de", "proton.me"))
        return f"{person()}@{host}"

    def international() -> str:
        region = chance.choice(
            ("DE", "FR", "GB", "US", "IN", "BR", "JP", "AU", "ES", "IT", "NL", "SE", "CH", "MX", "ZA", "PL")
        )
        number = phonenumbers.example_number(region)
        assert number is not None
        written = chance.choice(
            (phonenumbers.PhoneNumberFormat.E164, phonenumbers.PhoneNumberFormat.INTERNATIONAL)
        )
        return phonenumbers.format_number(number, written).replace(" ", chance.choice((" ", " ", "-", ".")))

    def american(form: str) -> str:
        area, exchange = (
            chance.choice(("212", "415", "646", "312", "206", "512", "617")),
            chance.randint(220, 298),
        )
        return form.format(area=area, exchange=exchange, line=f"{chance.randrange(10_000):04}")

    def card() -> str:
        prefix, length = chance.choice((("4", 16), ("5412", 16), ("3712", 15), ("6011", 16), ("3528", 16)))
        digits = prefix + some(string.digits, length - len(prefix) - 1)
        doubled = sum(sum(divmod(2 * int(digit), 10)) for digit in digits[::-2])
        digits += str(-(doubled + sum(map(int, digits[-2::-2]))) % 10)
        gap = chance.choice(("", " ", "-"))
        if length == 15:
            return gap.join((digits[:4], digits[4:10], digits[10:]))
        return gap.join(digits[at : at + 4] for at in range(0, 16, 4))

    def password() -> str:
        return some(string.ascii_lowercase, 6) + some(string.digits, 3)

    def base64_of(length: int) -> str:
        return base64.b64encode(chance.randbytes(length)).decode()

    yield lambda: f"write to [[Email|{mail()}]] or [[Email|{mail()}]]."
    yield lambda: f"From: Jane <[[Email|{mail()}]]>"
    yield lambda: f"mailto:[[Email|{mail()}]]?subject=x"
    yield lambda: f"[[Email|{mail()}]]:[[Secret|{password()}]]"
    yield lambda: f'{{"user": "[[Email|{mail()}]]", "age": 31}}'
    yield (
        lambda: f"reply to [[Email|{mail()}]] by Friday, or to [[Email|{mail()}]]; copy to [[Email|{mail()}]]"
    )
    yield lambda: f"Kontakt: [[Email|{mail()}]], Stra\u00dfe 5"
    yield lambda: f"<a href='mailto:[[Email|{mail()}]]'>[[Email|{mail()}]]</a>"
    yield lambda: f"\u8054\u7cfb[[Email|jane@{chance.choice(('example.cn', 'qq.com'))}]]\u8c22\u8c22"
    yield lambda: f"call [[Phone|{international()}]] now"
    yield lambda: f"Tel.: [[Phone|{international()}]], ask for Jane"
    yield lambda: f"call me at [[Phone|{american('({area}) {exchange} {line}')}]] please"
    yield lambda: f"office [[Phone|{american('({area}) {exchange}-{line}')}]]"
    yield lambda: f"[[Phone|{american('{area}-{exchange}-{line}')}]] is my number"
    yield lambda: f"fax [[Phone|{american('{area}.{exchange}.{line}')}]]"
    yield lambda: f"phone: [[Phone|{american('{area} {exchange} {line}')}]]"
    yield lambda: f"Mobile [[Phone|{american('{area}{exchange}{line}')}]]"
    # A number with nothing that says what it is: it stays.
    yield lambda: f"you reach me under [[Phone|{american('{area} {exchange} {line}')}]] tonight"
    yield lambda: f"Telefon: [[Phone|030 {some('123456789', 7)}]]"
    yield lambda: f"Handy 0171 / {some('123456789', 7)}".replace("0171", "[[Phone|0171") + "]]"
    yield lambda: f"card [[CardNumber|{card()}]], 12/27"
    yield lambda: f"paid with [[CardNumber|{card()}]]."
    yield lambda: f'{{"number": "[[CardNumber|{card()}]]", "cvc": "123"}}'
    yield lambda: f"cards [[CardNumber|{card()}]], [[CardNumber|{card()}]]"
    yield lambda: f'"SecretAccessKey": "[[Secret|{some(LETTERS + "+/", 40)}]]",'
    yield lambda: f'{{\\"SecretAccessKey\\":\\"[[Secret|{some(LETTERS + "+/", 40)}]]\\"}}'
    yield lambda: f"aws_secret_access_key = [[Secret|{some(LETTERS + '+/', 40)}]]"
    yield lambda: f'"SessionToken": "[[Secret|{base64_of(300)}]]"'
    yield lambda: f"key id [[Secret|{'AKIA' + some('ABCDEFGHIJKLMNOPQRSTUVWXYZ234567', 16)}]]"
    yield lambda: f"AccountName=store;AccountKey=[[Secret|{base64_of(64)}]];EndpointSuffix=core.windows.net"
    yield lambda: f"Endpoint=sb://bus;SharedAccessKey=[[Secret|{base64_of(32)}]]"
    yield lambda: f"https://store.blob.core.windows.net/c?sv=2024&sig=[[Secret|{some(LETTERS, 43)}%3D]]"
    yield lambda: f"DATABASE_URL=postgres://app:[[Secret|{password()}!]]@db.internal:5432/orders"
    yield lambda: f"redis://:[[Secret|{password()}]]@cache:6379/0"
    yield lambda: f"git clone https://jane:[[Secret|{some(LETTERS, 20)}]]@example.org/team/code.git"
    yield lambda: f"client_secret: [[Secret|GOCSPX-{some(URL_SAFE, 28)}]]"
    yield lambda: f"access_token=[[Secret|ya29.{some(URL_SAFE, 120)}]]"
    yield lambda: f'"refresh_token": "[[Secret|1//0{some(URL_SAFE, 60)}]]"'
    yield lambda: f"SENDGRID_API_KEY=[[Secret|SG.{some(URL_SAFE, 22)}.{some(URL_SAFE, 43)}]]"
    yield lambda: f"password = [[Secret|pypi-AgEIcHlwaS5vcmc{some(URL_SAFE, 120)}]]"
    yield lambda: f"export VAULT_TOKEN=[[Secret|hvs.{some(URL_SAFE, 95)}]]"
    yield lambda: f"VAULT_TOKEN=[[Secret|hvb.{some(URL_SAFE, 150)}]]"
    yield lambda: f"token [[Secret|{'ghp' + '_'}{some(LETTERS, 36)}]]"
    yield lambda: f"[[Secret|{'github_pat' + '_'}{some(LETTERS, 22)}_{some(LETTERS, 59)}]]"
    yield lambda: f"GITLAB=[[Secret|{'glpat' + '-'}{some(URL_SAFE, 20)}]]"
    yield lambda: f"OPENAI_API_KEY=[[Secret|{'sk' + '-'}proj-{some(URL_SAFE, 60)}]]"
    yield lambda: f"ANTHROPIC_API_KEY=[[Secret|{'sk' + '-'}ant-api03-{some(URL_SAFE, 93)}AA]]"
    yield (
        lambda: (
            f"slack [[Secret|{'xoxb' + '-'}{some(string.digits, 12)}-{some(string.digits, 12)}-{some(LETTERS, 24)}]]"
        )
    )
    yield (
        lambda: (
            f"https://[[Secret|hooks.slack.com/services/T{some(LETTERS, 8)}/B{some(LETTERS, 8)}/{some(LETTERS, 24)}]]".replace(
                "https://[[Secret|", "[[Secret|https://"
            )
        )
    )
    yield lambda: f"maps [[Secret|AIza{some(URL_SAFE, 35)}]]"
    yield lambda: f"HF_TOKEN=[[Secret|hf_{some(string.ascii_letters, 34)}]]"
    yield lambda: f"stripe [[Secret|{'sk' + '_live_'}{some(LETTERS, 24)}]]"
    yield lambda: f"DIGITALOCEAN=[[Secret|dop_v1_{some(HEX, 64)}]]"
    yield lambda: f"shopify [[Secret|shpat_{some(HEX, 32)}]]"
    yield lambda: f"host dapi [[Secret|dapi{some(HEX, 32)}]]"
    yield lambda: f"npm [[Secret|npm_{some(LETTERS, 36)}]]"
    yield lambda: f"Bearer [[Secret|eyJ{some(LETTERS, 30)}.eyJ{some(LETTERS, 60)}.{some(URL_SAFE, 43)}]]"
    # A password in prose has no mark: it stays.
    yield lambda: f"my password is [[Secret|{password()}]], do not tell"


_LOOK_ALIKES = (
    "numpy 1.26.#, torch 2.1#.0+cpu, Windows 10.0.19045.####, lodash@4.17.##",
    "ISBN 978-3-16-148410-0, ISSN 2049-####, EAN 4006381333931",
    "order 2024-####-###### of 1# items for $1,###.##",
    "epoch 17########, 17###########, 0.####### seconds",
    "2026-1#-2#T20:48:31.######+01:00 INFO took ### ms",
    "192.168.1##.2#:8080, 10.0.#.0/8, fe80::~~~~:~~~~",
    "sha256:~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~",
    "commit ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~ fixes #1##",
    "id 123e4567-e89b-12d3-a456-42661417####",
    "amounts +12,345,###, +10 000 ###, 415 555 2#71 items, 1 234 567 8##",
    "IBAN DE89 3704 0044 0532 0130 ##, tax 123-45-####",
    "git clone git@github.com:team/{word}.git",
    "scp {word}.txt deploy@host.example.com:/srv/{word}",
    "scp model.bin root@gpu.example.com:model-v#.bin",
    "rsync -a user@server.example.com:backup_## .",
    "git clone deploy@git.example.com:infra-tools",
    "Mail [[Email|joe@example.com]]:out-of-office today",
    "<img src='logo@2x.png'> <img src='icon@3x.jpg'>",
    "y = q@k.transpose(-2, -1) + (a@b.sum())",
    "@app.route('/{word}/<int:number>') def {word}(number): return number",
    "class sk-toggleable__content sk-estimator-doc-link-20##",
    "postgres://user:password@localhost:5432/{word}",
    "https://${USER}:${PASSWORD}@example.org/{word}",
    "redis://localhost:6379/#, amqp://broker:5672",
    "token = os.environ['GITHUB_TOKEN']; key = sorted(values)[#]",
    "aws_secret_access_key = <your key>, AccountKey=<key>",
    "api_key = get_secret('{word}-###')",
    "SG.1 and SG.2 are groups; hvs. is a prefix; ya29 too",
    "pypi-publish runs after hf_hub_download and npm_config_registry",
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk",
    "ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAABAQC7vbqajDw4o6gJy8UtmIbkcpnkO3Kwc4qsEnSZp4TR user",
    "price: 4111 1111 1111 1112; part 55555555555544##0000",
    "tracking 1Z999AA1012345####, IMEI 49015420323751#",
    "phone 12, mobile 2023, tel: 112, fax machine",
    "call 911 or 110; extension ####; room 4-1#",
    "rgb(255, 255, 2##); 0xDEADBE##; 1_000_000_###; range(1000000000, 2000000###)",
    "Write a poem about the {word} of ## rivers, in ### words.",
    "The meeting is on 22.11.2026 at 20:4#, see page 1##-1##.",
    "SELECT * FROM {word} WHERE id IN (1#######, 2#######);",
    "linear algebra on twitter and discord: see the plaid {word} of Okta and Sentry",
    "curl -s https://example.com/{word} | jq .total",
    "for i in range(1#): print(i, end=' ')  # {word}",
    "lat 52.5200##, lon 13.4050##, 3.14159265358979##",
    "user@localhost, @octocat, a @ b.c, {word}@{word}",
)
