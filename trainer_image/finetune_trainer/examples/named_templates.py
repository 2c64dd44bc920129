"""Chat templates by name, for models whose tokenizer has no template or an unsuitable one.

Each of them renders the beginning of a conversation in the same way when the conversation continues, so that training can
distinguish answers from prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jinja2 import TemplateSyntaxError

from finetune_trainer.examples.template_input import FAILURES
from finetune_trainer.pod.exit_status import RecipeRefusedError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune_crds.chat import ChatTemplate

# Source: the chat format of OpenAI (ChatML), as Qwen's and many other tokenizers have it.
_CHATML = """\
{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# Source: Meta's model card of Llama 3, section "Prompt format".
_LLAMA3 = """\
{{ bos_token }}
{%- for message in messages %}
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
# Source: the tokenizer of Mistral-7B-Instruct-v0.3; a system turn becomes the beginning of the first prompt.
_MISTRAL = """\
{% set start = namespace(system='') %}
{% if messages and messages[0]['role'] == 'system' %}
{% set start.system = messages[0]['content'] + '\\n\\n' %}
{% set turns = messages[1:] %}
{% else %}
{% set turns = messages %}
{% endif %}
{{ bos_token }}
{%- for message in turns %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] %}
{{ raise_exception('after an optional system turn, the roles must be user and assistant in turns') }}
{% endif %}
{% if message['role'] == 'user' %}
{{ '[INST] ' + (start.system if loop.first else '') + message['content'] + '[/INST]' }}
{%- else %}
{{ ' ' + message['content'] | trim + eos_token }}
{%- endif %}
{% endfor %}
"""
# Source: the prompt of Stanford Alpaca, with a line break after "Response:"; a system turn replaces the prompt's first sentences.
_ALPACA = """\
{% set start = namespace(system='Below is an instruction that describes a task. \
Write a response that appropriately completes the request.') %}
{% if messages and messages[0]['role'] == 'system' %}
{% set start.system = messages[0]['content'] %}
{% set turns = messages[1:] %}
{% else %}
{% set turns = messages %}
{% endif %}
{{ bos_token }}{{ start.system + '\\n\\n' }}
{%- for message in turns %}
{% if message['role'] == 'user' %}
{{ '### Instruction:\\n' + message['content'] + '\\n\\n' }}
{%- elif message['role'] == 'assistant' %}
{{ '### Response:\\n' + message['content'] + eos_token + '\\n\\n' }}
{%- else %}
{{ raise_exception('after an optional system turn, the roles must be user and assistant') }}
{% endif %}
{% endfor %}
{% if add_generation_prompt %}
{{ '### Response:\\n' }}
{%- endif %}
"""
_TEMPLATES = {"ChatML": _CHATML, "Llama3": _LLAMA3, "Mistral": _MISTRAL, "Alpaca": _ALPACA}


def set_template(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> None:
    """Give a tokenizer another chat template.

    Raises:
        RecipeRefusedError: model.chatTemplate.jinja is not a valid Jinja template.
    """
    tokenizer.chat_template = template.jinja if template.jinja is not None else _TEMPLATES[template.type]
    if template.jinja is None:
        return
    try:
        # NB: rendering also compiles the template as for real conversations: in the sandbox, with the extensions of transformers.
        tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise RecipeRefusedError(
            f"model.chatTemplate.jinja is not a valid Jinja template: line {error.lineno}: {error.message}"
        ) from error
    except FAILURES:
        # A template may refuse this conversation and accept the conversations of the data.
        pass
