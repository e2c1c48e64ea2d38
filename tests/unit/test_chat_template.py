"""Chat templates in the shape of those of real models, with the prompts written out by hand."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cuengine.errors import ModelError, RequestError
from cuengine.model import chat_template
from cuengine.model.chat_template import ChatTemplate

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief."}
ASSISTANT = {"role": "assistant", "content": "Hello."}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = (
    "{% for message in messages %}{% if loop.first and message.role != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = '<<SYS>>\\n' ~ messages[0]['content'] ~ '\\n<</SYS>>\\n\\n' %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set content = system_message + message['content'] if loop.first else message['content'] %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""

LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'}}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
    {%- else %}
        {{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{% endfor %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

HERMES = """{%- macro type_of(schema) %}
    {%- if schema.type == 'array' %}list[{{ schema['items'].type }}]
    {%- else %}{{ schema.type }}
    {%- endif %}
{%- endmacro %}
{{- '<|im_start|>system\\nTools:' }}
{%- for tool in tools if tool.type == 'function' %}
    {{- '\\n' ~ tool.function | tojson }}
    {%- for name, schema in tool.function.parameters.properties.items() %}
        {{- ' # ' + name + ': ' }}
        {{- type_of(schema) }}
    {%- endfor %}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == 'hidden' %}{% continue %}{% endif %}
    {%- if message.role == 'end' %}{% break %}{% endif %}
    {%- if message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- for call in message.tool_calls %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}"""


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": source}, TOKENS).render(messages, **options)


def test_chatml_with_a_default_system_message() -> None:
    assert render(CHATML, [USER]) == (
        "<|im_start|>system\nYou are helpful.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chatml_without_a_generation_prompt() -> None:
    assert render(CHATML, [SYSTEM, USER, ASSISTANT], add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello.<|im_end|>\n"
    )


def test_llama_2_puts_the_system_message_into_the_first_turn() -> None:
    assert render(LLAMA_2, [SYSTEM, USER, ASSISTANT, USER]) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Hello. </s><s>[INST] Hi [/INST]"
    )


def test_a_template_that_refuses_the_messages_makes_a_request_error_with_its_words() -> None:
    with pytest.raises(RequestError, match="Roles must alternate user/assistant") as caught:
        render(LLAMA_2, [USER, USER])
    assert caught.value.param == "messages"


def test_llama_3_with_a_date_of_the_request() -> None:
    assert render(LLAMA_3, [SYSTEM, USER], date_string="1 May 2024") == (
        "<s><|start_header_id|>system<|end_header_id|>\n\n"
        "Today Date: 1 May 2024\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_strftime_now_gives_todays_date() -> None:
    before = datetime.now().strftime("%d %b %Y")
    prompt = render(LLAMA_3, [USER])
    after = datetime.now().strftime("%d %b %Y")
    assert f"Today Date: {before}\n" in prompt or f"Today Date: {after}\n" in prompt


def test_tools_are_written_as_json_with_an_indent_and_without_escapes() -> None:
    tools = [{"name": "größe", "<b>": ["a & b"]}]
    assert (
        '{\n    "name": "größe",\n    "<b>": [\n        "a & b"\n    ]\n}\n\n<|eot_id|>'
        in render(LLAMA_3, [USER], tools=tools)
    )


def test_mistral() -> None:
    assert render(MISTRAL, [USER, ASSISTANT, USER]) == (
        "<s>[INST] Hi[/INST] Hello.</s>[INST] Hi[/INST]"
    )
    with pytest.raises(RequestError, match="Only user and assistant roles"):
        render(MISTRAL, [SYSTEM, USER])


def test_zephyr() -> None:
    assert render(ZEPHYR, [SYSTEM, USER]) == (
        "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\n"
    )


def test_hermes_tools_macros_and_loop_controls() -> None:
    function = {
        "name": "add",
        "parameters": {"properties": {"xs": {"type": "array", "items": {"type": "number"}}}},
    }
    call = {"function": {"name": "add", "arguments": {"xs": [1, 2]}}}
    messages = [
        {"role": "hidden", "content": "no"},
        USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "end"},
        USER,
    ]
    tools = [{"type": "function", "function": function}, {"type": "other"}]
    assert render(HERMES, messages, tools=tools) == (
        '<|im_start|>system\nTools:\n{"name": "add", "parameters": {"properties": '
        '{"xs": {"type": "array", "items": {"type": "number"}}}}} # xs: list[number]<|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"xs": [1, 2]}}\n'
        "</tool_call><|im_end|>\n"
    )


def test_generation_blocks_leave_no_trace() -> None:
    source = (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"
    )
    assert render(source, [USER, ASSISTANT]) == "Hi;Hello.;"


def test_arguments_of_the_request_and_documents_reach_the_template() -> None:
    source = "{{ documents[0].title }} {{ enable_thinking }} {{ tools is none }}"
    assert render(source, [USER], documents=[{"title": "A"}], enable_thinking=False) == (
        "A False True"
    )


def test_a_message_without_the_optional_fields_is_no_error() -> None:
    assert render("{% if messages[0].tool_calls %}x{% endif %}y", [USER]) == "y"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("One, two", "<|im_start|>assistant\nOne, two"),
        ("  One, two", "<|im_start|>assistant\n  One, two"),
        ("One, two \n", "<|im_start|>assistant\nOne, two \n"),
    ],
)
def test_a_final_message_can_be_continued(content: str, expected: str) -> None:
    prompt = render(
        CHATML,
        [USER, {"role": "assistant", "content": content}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert prompt.endswith(expected)


def test_a_final_message_that_the_template_trims_is_continued_at_its_trimmed_end() -> None:
    prompt = render(
        LLAMA_3,
        [USER, {"role": "assistant", "content": " One, two "}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert prompt.endswith("<|end_header_id|>\n\nOne, two")


def test_the_last_occurrence_of_the_final_content_is_the_one_continued() -> None:
    prompt = render(
        CHATML,
        [{"role": "user", "content": "same"}, {"role": "assistant", "content": "same"}],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert prompt.endswith("<|im_start|>assistant\nsame")


@pytest.mark.parametrize(
    ("source", "final", "message"),
    [
        (LLAMA_3 + "{{ x }}", {"role": "assistant"}, "a last message with text"),
        (CHATML, {"role": "assistant", "content": " "}, "a last message with text"),
        ("{{ messages[-1].content | upper }}", ASSISTANT, "changes the last message's content"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(
    source: str, final: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        render(source, [USER, final], add_generation_prompt=False, continue_final_message=True)


def test_continuing_and_a_new_turn_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render(CHATML, [USER, ASSISTANT], continue_final_message=True)


def write(folder: Path, name: str, content: Any) -> None:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def rendered(folder: Path, override: str | None = None, **options: Any) -> str:
    template = ChatTemplate.from_folder(folder, override)
    assert template is not None
    return template.render([USER], **options)


def test_a_folder_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.from_folder(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"bos_token": "<s>"})
    assert ChatTemplate.from_folder(tmp_path) is None


def test_special_tokens_reach_the_template_however_they_are_spelled(tmp_path: Path) -> None:
    config = {
        "chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}.{{ pad_token }}",
        "bos_token": {"content": "<s>", "lstrip": False, "__type": "AddedToken"},
        "eos_token": "</s>",
        "pad_token": None,
    }
    write(tmp_path, "tokenizer_config.json", config)
    write(tmp_path, "special_tokens_map.json", {"eos_token": "no", "unk_token": "<unk>"})
    assert rendered(tmp_path) == "<s></s><unk>."


def test_named_templates_are_chosen_by_whether_there_are_tools(tmp_path: Path) -> None:
    templates = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    write(tmp_path, "tokenizer_config.json", {"chat_template": templates})
    assert rendered(tmp_path) == "plain"
    assert rendered(tmp_path, tools=[{}, {}]) == "with 2"


def test_several_templates_without_a_default_need_a_choice(tmp_path: Path) -> None:
    templates = [{"name": "rag", "template": "a"}, {"name": "chat", "template": "b"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": templates})
    with pytest.raises(RequestError, match="chat, rag but no default"):
        rendered(tmp_path)


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config"})
    assert rendered(tmp_path) == "config"
    write(tmp_path, "chat_template.json", {"chat_template": "json"})
    assert rendered(tmp_path) == "json"
    write(tmp_path, "chat_template.jinja", "jinja")
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "tools")
    assert rendered(tmp_path) == "jinja"
    assert rendered(tmp_path, tools=[{}]) == "tools"


def test_an_override_is_a_template_or_a_file(tmp_path: Path) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": "config", "bos_token": "<s>"})
    write(tmp_path, "mine.txt", "file {{ bos_token }}")
    assert rendered(tmp_path, str(tmp_path / "mine.txt")) == "file <s>"
    assert rendered(tmp_path, "text {{ bos_token }}") == "text <s>"
    with pytest.raises(ModelError, match=r"missing\.jinja: no such file"):
        ChatTemplate.from_folder(tmp_path, "missing.jinja")
    with pytest.raises(ModelError, match="no such file"):
        ChatTemplate.from_folder(tmp_path, "x" * 5000)


@pytest.mark.parametrize("template", [3, ["x"], [{"name": "default"}], {"default": "x"}])
def test_a_template_of_another_kind_is_refused(tmp_path: Path, template: Any) -> None:
    write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: chat_template is neither"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize("source", ["a\n{% for x in %}", "a\n{{ x", "a\n{% nothing %}"])
def test_a_broken_template_is_refused_at_load_with_its_line(source: str) -> None:
    with pytest.raises(ModelError, match="chat template 'default', line 2: "):
        ChatTemplate({"default": source})


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not UTF-8"):
        ChatTemplate.from_folder(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{{ nothing.at.all }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages | tojson(indent='x', nope=1) }}",
        "{{ 1 / 0 }}",
        "{% for x in 3 %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
    ],
)
def test_a_template_that_fails_makes_a_request_error(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template failed on these messages"):
        render(source, [USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__.__mro__}'.format(1) }}",
        "{{ 'x' * 10000000000 }}",
        "{{ [1] * 10000000000 }}",
        "{{ 10000000000 * 'x' }}",
        "{{ 9 ** 99999999 }}",
    ],
)
def test_a_template_that_leaves_the_sandbox_is_stopped(source: str) -> None:
    with pytest.raises(RequestError, match="the chat template"):
        assert render(source, [dict(USER)]) == "nothing"


def test_a_template_cannot_change_the_messages() -> None:
    message = dict(USER)
    with pytest.raises(RequestError):
        render("{{ messages[0].pop('role') }}", [message])
    assert message == USER


def test_a_template_that_loops_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_CPU_SECONDS", 0.05)
    loops = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(RequestError, match=r"ran for more than 0\.05 s"):
        render(loops, [USER])


def test_a_prompt_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_PROMPT_CHARACTERS", 1000)
    with pytest.raises(RequestError, match="more than 1000 characters"):
        render("{% for i in range(99999) %}abc{% endfor %}", [USER])


def test_loop_variables_work_as_ever_within_the_limits() -> None:
    source = (
        "{% for a in [1, 2, 3] %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}"
        "{{ loop.previtem if loop.previtem is defined }}{% else %}none{% endfor %}"
        "{% for k, v in {'x': 1}.items() %}{{ k }}{{ v }}{% endfor %}"
        "{% for n in [] %}{% else %}empty{% endfor %}"
        "{% for n in missing %}{% else %}missing{% endfor %}"
        "{% for n in [[1, []]] recursive %}{{ n[0] }}{{ loop(n[1]) }}{% endfor %}"
    )
    assert render(source, [USER]) == "1/3,2/3,13/32x1emptymissing1"


@pytest.mark.parametrize(
    ("source", "takes_tools", "style"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}", False, None),
        ("{{ messages[0].tools }}", False, None),
        ("{% if tools %}{{ tools | tojson }}{% endif %}", True, None),
        ("{% if tools is defined %}<tool_call>{% endif %}", True, "hermes"),
        ("{% for t in tools %}{{ t }}{% endfor %}[TOOL_CALLS]", True, "mistral"),
        ("{% if not tools %}{% set tools = none %}{% endif %}<|python_tag|>", True, "llama3_json"),
        ('{{ tools }}{"name": function name, "parameters": dictionary}', True, "llama3_json"),
    ],
)
def test_what_a_template_does_with_tools_is_read_from_it(
    source: str, takes_tools: bool, style: str | None
) -> None:
    template = ChatTemplate({"default": source})
    assert (template.takes_tools, template.tool_call_format) == (takes_tools, style)


def test_a_template_for_tools_beside_the_default_counts() -> None:
    template = ChatTemplate({"default": "{{ messages }}", "tool_use": "{{ tools }}[TOOL_CALLS]"})
    assert (template.takes_tools, template.tool_call_format) == (True, "mistral")
