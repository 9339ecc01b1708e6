"""Log probabilities in the two shapes of the OpenAI API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from moe_serve.api.schemas.chat import ChatLogprobs, ChatTokenLogprob, ChatTopLogprob
from moe_serve.api.schemas.completions import CompletionLogprobs
from moe_serve.output import LogprobEntry
from moe_serve.tokenizer import Tokenizer


def chat_logprobs(entries: Sequence[LogprobEntry] | None) -> ChatLogprobs | None:
    """Tokens that add nothing to the text are left out, so that joined bytes are the text."""
    if entries is None:
        return None
    return ChatLogprobs(content=[_chat_entry(entry) for entry in entries if not entry.is_hidden])


def _chat_entry(entry: LogprobEntry) -> ChatTokenLogprob:
    return ChatTokenLogprob(
        token=entry.text,
        logprob=entry.logprob,
        bytes=list(entry.raw_bytes),
        top_logprobs=[
            ChatTopLogprob(token=top.text, logprob=top.logprob, bytes=list(top.raw_bytes))
            for top in entry.top
        ],
    )


class CompletionLogprobWriter:
    """Writes the entries of one choice, in order, and keeps count of the text's characters.

    Every token is listed. A token that is part of a character is named as OpenAI does it, by its
    bytes ("bytes:\\xf0\\x9f"), so that two of them are not one key. `top_logprobs` holds the
    alternatives asked for, and the token itself where it is not among them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def write_prompt(
        self,
        token_ids: Sequence[int],
        entries: Sequence[LogprobEntry | None],
        *,
        text: str,
        skip_special_tokens: bool,
    ) -> CompletionLogprobs:
        """Of a prompt echoed as `text`. Nothing precedes the first token: its values are null."""
        first_bytes = self._tokenizer.token_bytes(token_ids[0])
        is_hidden = skip_special_tokens and token_ids[0] in self._tokenizer.special_ids
        rest = [entry for entry in entries if entry is not None]
        shown = [b"" if is_hidden else first_bytes]
        shown += [entry.raw_bytes for entry in rest if not entry.is_hidden]
        # SentencePiece has a space before the first word that the text has not.
        num_extra = len(b"".join(shown).decode(errors="replace")) - len(text)
        self._num_characters = -max(0, num_extra)
        first = CompletionLogprobs(
            tokens=[token_name(first_bytes)],
            token_logprobs=[None],
            top_logprobs=[None],
            text_offset=[self._advance(shown[0])],
        )
        return joined(first, self.write(rest))

    def write(self, entries: Sequence[LogprobEntry]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[token_name(entry.raw_bytes) for entry in entries],
            token_logprobs=[entry.logprob for entry in entries],
            top_logprobs=[_alternatives(entry) for entry in entries],
            text_offset=[self._advance(b"" if e.is_hidden else e.raw_bytes) for e in entries],
        )

    def _advance(self, raw_bytes: bytes) -> int:
        offset = self._num_characters
        self._num_characters += len(self._decoder.decode(raw_bytes))
        return max(0, offset)


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def token_name(raw_bytes: bytes) -> str:
    try:
        return raw_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw_bytes)


def _alternatives(entry: LogprobEntry) -> dict[str, float] | None:
    named: dict[str, float] = {}
    for top in entry.top:
        # Best first: of two tokens with one name, the likelier stays.
        named.setdefault(token_name(top.raw_bytes), top.logprob)
    named.setdefault(token_name(entry.raw_bytes), entry.logprob)
    return named
