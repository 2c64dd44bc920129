"""The preparation that a recipe requests, and the columns of an example."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune_trainer.examples import chat_messages
from finetune_trainer.examples.columns import missing_weights_error
from finetune_trainer.pod.exit_status import RecipeRefusedError
from finetune_trainer.prep.expressions.jinja_template import JinjaTemplate
from finetune_trainer.prep.expressions.template import Template

if TYPE_CHECKING:
    from collections.abc import Mapping

    from finetune_crds.chat import Conversation
    from finetune_crds.cleaning import EvaluationSource
    from finetune_crds.data import Columns
    from finetune_crds.prepare import Prepare
    from finetune_crds.recipe import Recipe
    from finetune_crds.source import Source

# Columns of the table.
MESSAGES, TOOLS = "messages", "tools"
PROMPT, RESPONSE, CHOSEN, REJECTED = "prompt", "response", "chosen", "rejected"
COMPLETION, LABEL, MARGIN = "completion", "label", "margin"


@dataclass(frozen=True)
class Form:
    """The source columns of an example, and its columns in the table.

    required: source columns that must not be null or blank.
    content: source columns with the text of the example, which decides on its length and on duplicates.
    rendered: the table's text columns, each with its template.
    messages: source column with a conversation; `rendered` is then empty.
    prompt: source column with the prompt.
    conversation: if set, the prompt and the answers in `rendered` become messages of a conversation.
    tools: source column with the tools of the conversation in `messages`.
    lists: source columns of a preference that hold conversations.
    carried: fields of messages that are kept in addition to role and content.
    label: source column that labels the answer as good or bad, if there is one.
    margin: source column that says by how much the chosen answer is better, if there is one.
    weight: field of the source's messages with their weight in the loss, if the recipe names it.
    """

    required: tuple[str, ...]
    content: tuple[str, ...]
    rendered: dict[str, Template | JinjaTemplate]
    messages: str | None = None
    prompt: str | None = None
    conversation: Conversation | None = None
    tools: str | None = None
    lists: tuple[str, ...] = ()
    carried: tuple[str, ...] = ()
    label: str | None = None
    margin: str | None = None
    weight: str | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the example in the table, other than its label and its margin."""
        if self.messages:
            return (MESSAGES, TOOLS) if self.tools else (MESSAGES,)
        return (MESSAGES,) if self.conversation and not self.judged else tuple(self.rendered)

    @property
    def judged(self) -> tuple[str, ...]:
        """The table's columns with the answers of a preference, good or bad; separate columns even if they hold conversations."""
        return tuple(name for name in (CHOSEN, REJECTED, COMPLETION) if name in self.rendered)

    @property
    def spoken(self) -> tuple[str, ...]:
        """The source columns that hold conversations."""
        return (self.messages,) if self.messages else self.lists

    @property
    def has_turns(self) -> bool:
        """Whether the chat template of the model renders the example."""
        return bool(self.spoken or self.conversation)

    @property
    def jinja(self) -> tuple[JinjaTemplate, ...]:
        """The Jinja templates in `rendered`."""
        return tuple(template for template in self.rendered.values() if isinstance(template, JinjaTemplate))


@dataclass(frozen=True)
class Request:
    """The preparation that a recipe requests, before the source is read.

    templates: the source columns that templates name.
    """

    source: Source
    prepare: Prepare
    templates: tuple[str, ...]

    @property
    def source_name(self) -> str:
        """The source as the recipe names it."""
        return self.source.address

    @property
    def evaluation(self) -> list[EvaluationSource]:
        """The evaluation sets."""
        return _evaluation_sets(self.prepare)


@dataclass(frozen=True)
class Plan(Request):
    """The preparation that a recipe requests, with the columns of an example."""

    form: Form

    @property
    def columns(self) -> tuple[str, ...]:
        """Every source column that the recipe names, except in the SQL filter."""
        prepare = self.prepare
        names = [*self.form.required, *self.form.content, *prepare.not_null]
        names += [prepare.quality_column] if prepare.min_quality is not None else []
        names += prepare.dedupe.columns or []
        names += [name for name in (prepare.split_ratios.key, prepare.split_ratios.stratify_by) if name]
        return tuple(dict.fromkeys(names))


def build_request(recipe: Recipe) -> Request:
    """Return the preparation that a recipe requests. The recipe may name no columns.

    Raises:
        RecipeRefusedError: data.source or data.prepare is missing, or a template cannot be parsed.
    """
    data = recipe.data
    if data.source is None or data.prepare is None:
        raise RecipeRefusedError(
            "a preparation requires data.source and data.prepare: without them, training starts directly"
        )
    columns = [column for template in _parse_templates(data.prepare).values() for column in template.columns]
    return Request(data.source, data.prepare, tuple(dict.fromkeys(columns)))


def build_plan(recipe: Recipe, conversations: Mapping[str, tuple[str, ...]] | None = None) -> Plan:
    """Return the preparation of a recipe that names the columns of an example.

    Args:
        conversations: the source columns that hold lists of {role, content}, each with the other fields of messages to keep,
            for example `{"messages": ("tool_calls", "weight")}`. None: the source has not been read yet.

    Raises:
        RecipeRefusedError: as `build_request`; or the recipe has fields for text and the columns hold conversations; or the recipe
            has onTemplateError: Drop, and no template can fail.
        DataError: messages do not have the field with their weight.
    """
    request, columns = build_request(recipe), recipe.data.columns
    assert columns is not None  # noqa: S101 - the caller has found them
    return Plan(
        request.source,
        request.prepare,
        request.templates,
        _build_form(columns, request.prepare, conversations),
    )


def _evaluation_sets(prepare: Prepare) -> list[EvaluationSource]:
    """Return the evaluation sets of a preparation."""
    return prepare.decontaminate.sources if prepare.decontaminate else []


def _can_template_fail(prepare: Prepare) -> bool:
    """Return whether the texts are rendered by a template that can fail on a row: the chat template or a Jinja template."""
    return prepare.conversation is not None or prepare.template_syntax == "Jinja"


_NEEDS_TEMPLATE = (
    "data.prepare.onTemplateError Drop requires a template that can fail: set data.columns.type to Messages, Preference or Unpaired, set "
    "data.prepare.conversation, or set data.prepare.templateSyntax to Jinja"
)


def _parse_templates(prepare: Prepare) -> dict[str, Template | JinjaTemplate]:
    """Parse the templates of a recipe, by field."""
    texts = {"promptTemplate": prepare.prompt_template, "responseTemplate": prepare.response_template}
    kind = JinjaTemplate if prepare.template_syntax == "Jinja" else Template
    return {
        name: kind.parse(text, f"data.prepare.{name}") for name, text in texts.items() if text is not None
    }


def _build_form(
    columns: Columns, prepare: Prepare, conversations: Mapping[str, tuple[str, ...]] | None = None
) -> Form:
    """Build the form of a conversation, of a preference, or of text; `conversations` is that of `build_plan`."""
    carried_fields = conversations or {}
    if columns.messages is not None:
        # A column of messages that is not in `conversations` is JSON text. Its fields are unknown, so it keeps all of them.
        is_json_text = conversations is not None and columns.messages not in carried_fields
        carried = chat_messages.CARRIED if is_json_text else carried_fields.get(columns.messages, ())
        # Without `conversations`, the source has not been read, so its fields are unknown.
        if columns.message_weight and conversations is not None and chat_messages.WEIGHT not in carried:
            raise missing_weights_error(columns.messages, columns.message_weight)
        return Form(
            required=(columns.messages,),
            content=(columns.messages, *([columns.tools] if columns.tools else [])),
            rendered={},
            messages=columns.messages,
            tools=columns.tools,
            carried=carried,
            weight=columns.message_weight,
        )
    judged_answer = columns.chosen or columns.completion
    if columns.prompt is not None and judged_answer is not None:
        judged = {CHOSEN: columns.chosen, REJECTED: columns.rejected, COMPLETION: columns.completion}
        answers = {name: column for name, column in judged.items() if column is not None}
        return _build_preference_form(columns, columns.prompt, answers, prepare, conversations)
    required = tuple(name for name in (columns.text, columns.prompt, columns.response) if name is not None)
    rendered = _build_templates(required, prepare)
    content = tuple(dict.fromkeys(column for template in rendered.values() for column in template.columns))
    # Templates may name no columns: then the columns of the example are the content.
    return Form(
        required=required,
        content=content or required,
        rendered=rendered,
        prompt=columns.prompt,
        conversation=prepare.conversation,
    )


def _build_preference_form(
    columns: Columns,
    prompt: str,
    answers: Mapping[str, str],
    prepare: Prepare,
    conversations: Mapping[str, tuple[str, ...]] | None,
) -> Form:
    """Build the form of a prompt with two answers, or with one answer and its label. Only the prompt may have a template."""
    carried_fields = conversations or {}
    lists = tuple(name for name in (prompt, *answers.values()) if name in carried_fields)
    refusals = [
        sentence
        for is_refused, sentence in _list_conversation_refusals(prompt, lists, prepare, conversations)
        if is_refused
    ]
    if refusals:
        raise RecipeRefusedError("; ".join(refusals))
    template = _parse_templates(prepare).get("promptTemplate", Template.of_column(prompt))
    return Form(
        required=(prompt, *answers.values(), *(name for name in (columns.label, columns.margin) if name)),
        content=tuple(dict.fromkeys([*template.columns, *answers.values()])),
        rendered={PROMPT: template, **{name: Template.of_column(column) for name, column in answers.items()}},
        prompt=prompt,
        conversation=prepare.conversation,
        lists=lists,
        carried=tuple(
            field for field in chat_messages.CARRIED if any(field in carried_fields[name] for name in lists)
        ),
        label=columns.label,
        margin=columns.margin,
    )


def _list_conversation_refusals(
    prompt: str,
    lists: tuple[str, ...],
    prepare: Prepare,
    conversations: Mapping[str, tuple[str, ...]] | None,
) -> list[tuple[bool, str]]:
    """Return pairs: whether a reason to refuse the recipe applies, and its sentence."""
    holds = f"column {prompt} holds conversations"
    return [
        (
            prompt in lists and prepare.prompt_template is not None,
            f"{holds}, and data.prepare.promptTemplate renders text: remove data.prepare.promptTemplate",
        ),
        (
            prompt in lists and prepare.conversation is not None and prepare.conversation.system is not None,
            f"{holds}, and data.prepare.conversation.system goes before prompts that are text: remove data.prepare.conversation.system",
        ),
        (
            conversations is not None
            and not lists
            and prepare.on_template_error == "Drop"
            and not _can_template_fail(prepare),
            f"{_NEEDS_TEMPLATE}; the columns hold text",
        ),
    ]


def _build_templates(required: tuple[str, ...], prepare: Prepare) -> dict[str, Template | JinjaTemplate]:
    """Return the templates by the columns of the table: `text`, or `prompt` and `response`."""
    templates: tuple[Template | JinjaTemplate, ...] = tuple(_parse_templates(prepare).values()) or tuple(
        map(Template.of_column, required)
    )
    if prepare.conversation and len(templates) == 1:
        # With promptTemplate alone, the answer is the response column unchanged.
        *_, response = required
        templates += (Template.of_column(response),)
    # Without a conversation, a single template renders the whole text of the example.
    names = ("text",) if len(templates) == 1 else (PROMPT, RESPONSE)
    return dict(zip(names, templates, strict=True))
