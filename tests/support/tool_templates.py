"""Chat templates that render tools, in the manner of two families of models."""

from __future__ import annotations

# As Hermes and Qwen have it: definitions in the system turn, calls in tags, results in a user turn.
HERMES = """\
{%- set system = messages[0].content if messages[0].role == 'system' else 'You may call tools.' %}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
    {{- '\\n<tools>' }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '\\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- for message in rest %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- if message.tool_calls is defined %}
            {%- for call in message.tool_calls %}
                {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
                {{- call.function.arguments | tojson }}
                {{- '}</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

# As Llama 3.1 has it: definitions in the first user turn, one call a turn, results in a turn of the interpreter.
LLAMA = """\
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'user' and loop.first and tools %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nCall one of these functions.\\n\\n' }}
        {%- for tool in tools %}
            {{- tool | tojson(indent=4) }}
            {{- '\\n\\n' }}
        {%- endfor %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- elif message.tool_calls %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('only single tool calls at once') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

TEMPLATES = {"Hermes": HERMES, "Llama": LLAMA}
