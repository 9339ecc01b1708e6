"""What prompts are made of: token ids that a model has and that mean nothing special."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moe_serve.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Below it, vocabularies keep their special tokens and single bytes, where they are large enough.
_FIRST_ID = 300
# To cut a text to its number of tokens: what is cut off may change how the rest is cut.
_TRIES = 4
# Whole words, a token each in most vocabularies with the space before.
_WORDS = (
    "the of and to in is was for on that with as it by at from his her they this are be not have "
    "which one had but all were when there more if out so said what up its about into than them "
    "can only other time new some could these two may then do first any my now such like our over "
    "man me even most made after also did many off before must well back through years much where "
    "your way down should because long each just state those people too mister how little good "
    "world make very year still see own work men day get here old life both between being under "
    "three never know same last another while us might great go come since against right came "
    "take used himself few house use place during high without again home small however found "
    "part once general school upon every does got war water until always away something fact less"
).split()


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Material:
    """Prompts are drawn from `ids`, evenly; `to_text` gives the text of some."""

    ids: npt.NDArray[np.int64]
    to_text: Callable[[Sequence[int]], str]

    def draw(self, random: np.random.Generator, num_tokens: int) -> list[int]:
        drawn: list[int] = self.ids[random.integers(len(self.ids), size=num_tokens)].tolist()
        return drawn


def words() -> Material:
    """English words: about as many tokens as words, whatever the vocabulary."""
    return Material(np.arange(len(_WORDS)), lambda ids: " ".join(_WORDS[each] for each in ids))


def ids_below(vocab_size: int) -> Material:
    """All ids of a vocabulary but its first ones."""
    first = min(_FIRST_ID, vocab_size // 2)
    return Material(np.arange(first, vocab_size), _no_text)


def ids_seen(ids: Sequence[int]) -> Material:
    """Ids that a server's own tokenizer gave for ordinary text."""
    return Material(np.unique(np.array(ids, dtype=np.int64)), _no_text)


def from_tokenizer(path: str) -> Material:
    """All ids of a tokenizer.json, or of the folder with it, but its special and added ones."""
    from tokenizers import Tokenizer

    file = Path(path) / "tokenizer.json" if Path(path).is_dir() else Path(path)
    try:
        tokenizer: Tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # tokenizers raises bare ones for what it cannot read
        raise ConfigError(f"--tokenizer {file} cannot be read: {error}") from error
    added = tokenizer.get_added_tokens_decoder()
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=False).values()) - set(added))
    if not ids:
        raise ConfigError(f"--tokenizer {file} has no ordinary token")
    return Material(np.array(ids), lambda some: _text_of(tokenizer, some))


def _text_of(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Text of as many tokens as `ids`, or of a few more or less.

    Random tokens side by side make text that is cut elsewhere, and mostly into more; what is too
    much is taken off the end, so that equal beginnings stay equal.
    """
    text: str = tokenizer.decode(list(ids))
    for _ in range(_TRIES):
        cut = tokenizer.encode(text, add_special_tokens=False).ids
        if len(cut) <= len(ids):
            break
        text = tokenizer.decode(cut[: len(ids)])
    return text


def probe_text(seed: int, num_letters: int) -> str:
    """Text that an ordinary tokenizer cuts into many different tokens."""
    random = np.random.default_rng([seed, 0x7E])
    letters = np.array([*string.ascii_letters, *string.digits, *" " * 12, *",.;:!?-()"])
    return "".join(random.choice(letters, size=num_letters))


def _no_text(ids: Sequence[int]) -> str:
    raise AssertionError("texts are made of words, or by a tokenizer")
