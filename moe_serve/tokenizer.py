"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_serve.chat import ChatTemplate, Message
from moe_serve.errors import CheckpointError, ConfigError, RequestError
from moe_serve.token_bytes import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Without one of these transformers makes up an empty tokenizer instead of failing.
_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """A model's tokenizer; all methods may run in several threads at once.

    Works on the Rust backend directly: transformers' own calls set truncation and padding on the
    shared backend first, which fails with "Already borrowed" while another thread encodes.
    Tokenizers without such a backend are refused.
    """

    def __init__(self, hf: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        backend = getattr(hf, "backend_tokenizer", None)
        if backend is None:
            raise CheckpointError(
                f"{type(hf).__name__} has no fast backend; the model needs a tokenizer.json"
            )
        # A tokenizer.json may carry the settings of its training; prompts are never cut here.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes = TokenBytes(backend)
        self.chat_template = ChatTemplate(hf, chat_template)
        self.vocab_size = len(hf)
        self.eos_token_id: int | None = hf.eos_token_id
        self.special_ids: frozenset[int] = frozenset(hf.all_special_ids) | {
            i for i, token in backend.get_added_tokens_decoder().items() if token.special
        }

    @classmethod
    def from_folder(cls, folder: Path, chat_template_file: Path | None = None) -> Tokenizer:
        """Load from a local model folder; nothing is downloaded and no code of it is run.

        Raises `CheckpointError` naming the folder if tokenizer files are missing or broken, and
        `ConfigError` if `chat_template_file` cannot be read or parsed.
        """
        template = None if chat_template_file is None else _read_template(chat_template_file)
        tokenizer = cls(_load(folder), chat_template=template)
        if chat_template_file is not None:
            _check_template(tokenizer.chat_template, chat_template_file)
        return tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds what the tokenizer adds by itself, such as BOS."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: lone surrogate at character {error.start}"
            ) from error
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Text of a whole sequence. Ids that the tokenizer lacks give nothing."""
        known = [i for i in ids if self.token_bytes(i)]
        return str(self._backend.decode(known, skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Exact bytes of the token in running text; b"" for ids that the tokenizer lacks."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """The token's bytes as text; a part of a character shows as U+FFFD."""
        return self._bytes[token_id].decode(errors="replace")

    def render_chat(self, messages: Sequence[Message]) -> list[int]:
        """Prompt ids of a chat; the template brings all special tokens itself.

        Raises `RequestError` if there is no template or it refuses these messages.
        """
        return self.encode(self.chat_template.render(messages), add_special_tokens=False)


def _load(folder: Path) -> PreTrainedTokenizerBase:
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise CheckpointError(
            f"{folder} holds no tokenizer: none of {', '.join(_VOCABULARY_FILES)}"
        )
    try:
        hf: PreTrainedTokenizerBase = _reader(folder).from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # transformers raises whatever its readers do: OSError, ValueError, KeyError, bare Exception
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {error}"
        ) from error
    return hf


def _reader(folder: Path) -> Any:
    """The transformers class that reads the folder. `AutoTokenizer` imports torch, which costs the
    server a second and 150 MB; a tokenizer.json says all that is needed without it.
    """
    if (folder / "tokenizer.json").is_file():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path} cannot be read: {error}") from error


def _check_template(template: ChatTemplate, path: Path) -> None:
    import jinja2

    try:
        template.check()
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"--chat-template {path} is not a valid template: line {error.lineno}: {error.message}"
        ) from error
