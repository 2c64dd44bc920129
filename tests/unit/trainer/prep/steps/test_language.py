# ruff: noqa: RUF001 - texts in many scripts
"""The language of texts, and the step that keeps some languages."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from finetune_crds.cleaning import Language
from finetune_trainer.prep.steps import language
from unit.trainer.prep.recipes import Preparer, table_of

Json = dict[str, Any]

# Translations of one question.
TEXTS: dict[str, str] = {
    "en": "How do I reset the password of my account when I no longer have access to my mail?",
    "de": "Wie setze ich das Passwort meines Kontos zurück, wenn ich keinen Zugriff mehr auf meine Mails habe?",
    "fr": "Comment réinitialiser le mot de passe de mon compte si je n'ai plus accès à ma messagerie ?",
    "es": "¿Cómo restablezco la contraseña de mi cuenta si ya no tengo acceso a mi correo?",
    "it": "Come posso reimpostare la password del mio account se non ho più accesso alla mia posta?",
    "pt": "Como redefino a senha da minha conta se não tenho mais acesso ao meu correio eletrônico?",
    "nl": "Hoe stel ik het wachtwoord van mijn account opnieuw in als ik geen toegang meer heb tot mijn mail?",
    "sv": "Hur återställer jag lösenordet till mitt konto om jag inte längre har tillgång till min e-post?",
    "no": "Hvordan tilbakestiller jeg passordet til kontoen min hvis jeg ikke lenger har tilgang til e-posten min?",
    "pl": "Jak zresetować hasło do mojego konta, jeśli nie mam już dostępu do poczty?",
    "tr": "E-postama artık erişimim yoksa hesabımın şifresini nasıl sıfırlarım?",
    "ru": "Как сбросить пароль, если у меня больше нет доступа к почте?",
    "zh": "如果我无法再访问我的电子邮件，如何重置我的密码？",
    "ja": "メールにアクセスできなくなった場合、どうすればよいですか。",
    "ko": "이메일에 더 이상 접근할 수 없을 때 비밀번호를 어떻게 재설정하나요?",
    "ar": "كيف يمكنني إعادة تعيين كلمة المرور الخاصة بحسابي؟",
    "hi": "मैं अपने खाते का पासवर्ड कैसे रीसेट करूँ?",
}
PYTHON = "def total(values):\n    result = 0\n    for value in values:\n        result += value\n    return result\n"
MIXED: dict[str, tuple[str, str | None]] = {
    "Python": (PYTHON, None),
    "C": ('#include <stdio.h>\nint main(void) {\n  printf("%d\\n", 3);\n  return 0;\n}', None),
    "Rust": ('fn main() {\n    let v: Vec<i32> = Vec::new();\n    println!("{:?}", v);\n}', None),
    "SQL": ("SELECT name, count(*) FROM users WHERE age > 3 GROUP BY name ORDER BY 2 DESC", None),
    "JSON": ('{"id": 1, "tags": ["a", "b"], "ok": true, "price": 12.5}', None),
    "numbers": ("1 2 3 4 5 6 7 8 9 10 11 12 13", None),
    "names": ("John Smith, Berlin, Germany", None),
    "a word": ("Nein", None),
    "nothing": (" ", None),
    "a short sentence": ("Ja, natürlich, sehr gerne", "de"),
    "a question with code": (
        f"Was macht dieser Code?\n```python\n{PYTHON * 20}```\nEr zählt die Zahlen.",
        "de",
    ),
    "code that does not end": (f"What does this code do for us?\n```\n{PYTHON * 20}", "en"),
    "addresses": (
        f"Siehe auch hier: {'https://example.com/the/house/of/the/rising/sun ' * 9}, danke schön",
        "de",
    ),
    "Norwegian as it is written in the west": ("Eg veit ikkje kva eg skal gjere med denne saka no", "no"),
}


def test_texts_are_in_their_languages() -> None:
    assert {code: language.detect(text) for code, text in TEXTS.items()} == {code: code for code in TEXTS}


@pytest.mark.parametrize(("text", "expected"), MIXED.values(), ids=MIXED)
def test_what_is_not_certain_has_no_language(text: str, expected: str | None) -> None:
    assert language.detect(text) == expected


def test_the_detector_knows_every_language_of_the_schema() -> None:
    detected_codes = {language._PART_OF.get(code, code) for code in language._load_detector().nb_classes}
    assert {*get_args(Language)} == {code for code in detected_codes if len(code) == 2}


def rows() -> list[Json]:
    pairs = [{"question": text, "answer": "42"} for text in TEXTS.values()]
    return [*pairs, {"question": PYTHON, "answer": "6"}, {"question": TEXTS["fr"], "answer": None}]


def test_examples_in_other_languages_are_dropped(prepare: Preparer) -> None:
    """An example is its prompt and its answer together; code stays."""
    both = [
        {"question": "Translate, please.", "answer": TEXTS["de"]},
        {"question": TEXTS["en"], "answer": f"{TEXTS['pl']} {TEXTS['pl'][:-1]}!"},
    ]
    result = prepare([*rows(), *both], languages=["en", "de"])
    assert result.dropped == {"notNull": 1, "language": len(TEXTS) - 2 + 1, "dedupe": 0}
    prompts = {row["prompt"] for row in table_of(result)}
    assert prompts == {TEXTS["en"], TEXTS["de"], PYTHON, "Translate, please."}


def test_conversations_without_their_roles_and_instructions(prepare: Preparer) -> None:
    instruction = {"role": "system", "content": f"{TEXTS['en']} " * 4}
    chats = [
        [instruction, {"role": "user", "content": TEXTS[code]}, {"role": "assistant", "content": "42"}]
        for code in ("de", "fr")
    ]
    columns = {"type": "Messages", "messages": "chat"}
    result = prepare([{"chat": chat} for chat in chats], columns=columns, languages=["fr"])
    assert [row["messages"] for row in table_of(result)] == chats[1:]
