from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from moe_serve.errors import RequestError
from moe_serve.tokenizer import Tokenizer

STRICT = """
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}{% endif %}
{{- '<|start|>' + message.role + ':' + message.content + '\\n' }}
{%- endfor %}
{%- if tools %}{{ tools | length }} tools{% endif %}
{%- if add_generation_prompt %}{{ 'assistant:' + (mood or '') }}{% endif %}"""
PARTS = """
{%- for message in messages %}{{ message.role }}:
{%- for part in message.content if part.type == 'text' %}[{{ part.text }}]{% endfor %}
{%- endfor %}"""
USER = {"role": "user", "content": "hi"}


def with_template(folder: Path, template: str) -> Tokenizer:
    file = folder / "given.jinja"
    file.write_text(template)
    return Tokenizer.from_folder(folder, file)


def test_a_chat_becomes_the_ids_of_its_rendered_text(tiny_folder: Path) -> None:
    tokenizer = with_template(tiny_folder, STRICT)
    ids = tokenizer.render_chat([USER])
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|start|>user:hi\nassistant:"
    assert ids[0] in tokenizer.special_ids


def test_tools_prompt_and_template_arguments_reach_the_template(tiny_folder: Path) -> None:
    template = with_template(tiny_folder, STRICT).chat_template
    assert template.render([USER], add_generation_prompt=False) == "<|start|>user:hi\n"
    assert template.render([USER], template_kwargs={"mood": "glad"}).endswith("assistant:glad")
    assert "1 tools" in template.render([USER], tools=[{"type": "function"}])


def test_the_tokenizers_own_template_is_used_and_can_be_replaced(tiny_folder: Path) -> None:
    hf = PreTrainedTokenizerFast.from_pretrained(tiny_folder)
    hf.chat_template = "own {{ messages[0].content }}"
    hf.save_pretrained(tiny_folder)
    assert Tokenizer.from_folder(tiny_folder).chat_template.render([USER]) == "own hi"
    assert with_template(tiny_folder, "given").chat_template.render([USER]) == "given"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "x"}, USER], "System role not supported"),
        ([USER, USER], "Roles must alternate"),
        ([{"role": "robot", "content": "x"}], "Roles must alternate"),
        ([{"role": "user", "content": None}], "."),
        ([{"role": "user"}], "."),
        ([{"content": "x"}], "Roles must alternate"),
        ([{"role": "user", "content": 5}], "content is int"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' is not supported"),
        ([{"role": "user", "content": ["x"]}], "'str' is not supported"),
        (["hi"], "a message is str"),
        ([], "empty"),
    ],
)
def test_what_the_template_refuses_is_the_requests_fault(
    tiny_folder: Path, messages: list[Any], reason: str
) -> None:
    tokenizer = with_template(tiny_folder, STRICT)
    with pytest.raises(RequestError, match=reason) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"
    assert tokenizer.render_chat([USER])


def test_template_arguments_cannot_replace_the_template(tiny_folder: Path) -> None:
    template = with_template(tiny_folder, STRICT).chat_template
    with pytest.raises(RequestError, match="chat_template"):
        template.render([USER], template_kwargs={"chat_template": "mine"})


def test_without_a_template_the_error_says_what_to_do(tiny_folder: Path) -> None:
    with pytest.raises(RequestError, match=r"--chat-template.*/v1/completions"):
        Tokenizer.from_folder(tiny_folder).render_chat([USER])


def test_content_takes_the_form_that_the_template_reads(tiny_folder: Path) -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}
    strings = with_template(tiny_folder, STRICT).chat_template
    assert "user:a\nb\n" in strings.render([parts])
    wants_parts = with_template(tiny_folder, PARTS).chat_template
    assert wants_parts.render([USER]) == "user:[hi]"
    assert wants_parts.render([parts]) == "user:[a][b]"


def test_known_templates_render_or_refuse_with_a_reason(
    tiny: Tokenizer, chat_templates: list[Path], tiny_folder: Path
) -> None:
    chats: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "needle"}],
        [
            {"role": "system", "content": "be kind"},
            {"role": "user", "content": [{"type": "text", "text": "needle"}]},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "再见 😀"},
        ],
        [{"role": "robot", "content": None}],
        [{"role": "user", "content": "needle"}, {"role": "user", "content": "b"}],
    ]
    refused = []
    for file in chat_templates:
        tokenizer = Tokenizer.from_folder(tiny_folder, file)
        for number, chat in enumerate(chats):
            try:
                text = tokenizer.chat_template.render(chat)
            except RequestError as error:
                assert error.param == "messages" and error.message
                refused.append((file.name, number))
            else:
                assert "needle" in text or number == 2
    plain = [name for name, number in refused if number == 0]
    assert plain == [], "a chat of one turn must render"
