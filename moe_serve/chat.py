"""Chat messages to prompt text, through the model's own template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from moe_serve.errors import RequestError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
_PROBE = "content-probe"
_JOINED_TOKENS = ("bos_token", "eos_token")


class ChatTemplate:
    """Renders messages with the Jinja template of a tokenizer (in transformers' sandbox).

    `source` is a template that replaces the tokenizer's own. Templates are code from outside that
    runs on a client's data, so any failure inside one is the request's: `RequestError` with
    param "messages" and the template's own message.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, source: str | None = None) -> None:
        self._tokenizer = tokenizer
        self._source = source
        self._wants_parts: bool | None = None

    @property
    def is_available(self) -> bool:
        return self._source is not None or bool(self._tokenizer.chat_template)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. `content` is a string, None, or a list of {"type": "text", "text": ...}
        parts; it is handed over in the form (string or parts) that the template can read.
        """
        if not self.is_available:
            raise RequestError(
                "this model has no chat template; start the server with --chat-template FILE, "
                "or send a ready prompt to /v1/completions",
                param="messages",
            )
        if not messages:
            raise RequestError("messages is empty; send at least one", param="messages")
        shape = _as_parts if self._reads_parts() else _as_string
        try:
            return self._apply(
                [_with_content(message, shape) for message in messages],
                tools=list(tools) if tools else None,
                add_generation_prompt=add_generation_prompt,
                **(template_kwargs or {}),
            )
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(_explain(error), param="messages") from error

    def check(self) -> None:
        """Raise `jinja2.TemplateSyntaxError` if the template cannot be parsed."""
        import jinja2

        try:
            self._apply([{"role": "user", "content": _PROBE}], add_generation_prompt=True)
        except jinja2.TemplateSyntaxError:
            raise
        except Exception:
            return  # it may refuse the probe; what matters is that it could be compiled

    def _apply(self, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        # Templates join these with `+`, which fails on a tokenizer that lacks them.
        absent = {name: "" for name in _JOINED_TOKENS if not getattr(self._tokenizer, name)}
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=self._source, tokenize=False, **{**absent, **kwargs}
        )
        if not isinstance(text, str):
            raise TypeError(f"the template gave {type(text).__name__}, not text")
        return text

    def _reads_parts(self) -> bool:
        """Whether string content would be lost and a list of parts would not.

        Found by rendering a probe both ways: a template that loops over parts shows nothing of a
        plain string, and a wrong form would drop what the user wrote without any error.
        """
        if self._wants_parts is None:
            self._wants_parts = not self._shows(_PROBE) and self._shows(_as_parts(_PROBE))
        return self._wants_parts

    def _shows(self, content: object) -> bool:
        try:
            text = self._apply([{"role": "user", "content": content}], add_generation_prompt=True)
        except Exception:
            return False
        return _PROBE in text


def _with_content(message: Message, shape: Callable[[object], object]) -> dict[str, Any]:
    """A copy of the message with its content in the form that the template reads."""
    if not isinstance(message, Mapping):
        raise RequestError(
            f"a message is {type(message).__name__}, not an object", param="messages"
        )
    copy = dict(message)
    if copy.get("content") is not None:
        copy["content"] = shape(copy["content"])
    return copy


def _as_string(content: object) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in _as_parts(content))


def _as_parts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise RequestError(
            f"message content is {type(content).__name__}; it must be a string or a list of parts",
            param="messages",
        )
    return [_text_part(part) for part in content]


def _text_part(part: object) -> dict[str, Any]:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return {"type": "text", "text": text}
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise RequestError(
        f"message content part {kind!r} is not supported; parts must be "
        '{"type": "text", "text": "..."}',
        param="messages",
    )


def _explain(error: Exception) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateError) and error.message:
        return error.message
    return f"the chat template cannot render these messages: {type(error).__name__}: {error}"
