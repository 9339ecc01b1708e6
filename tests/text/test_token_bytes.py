from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from moe_serve.token_bytes import TokenBytes, spell_byte_level
from moe_serve.tokenizer import Tokenizer


def sentencepiece_backend() -> tokenizers.Tokenizer:
    pieces = ["<unk>", "</s>", "▁hi", "▁", "h", "i", "<0xE4>", "<0xB8>", "<0x96>", "<0xZZ>", "▁▁"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["</s>", "<a▁b>"])
    backend.add_tokens([AddedToken("▁▁", normalized=False)])
    return backend


def test_every_byte_has_a_token_of_its_own(tiny: Tokenizer) -> None:
    assert sorted(tiny.token_bytes(i) for i in range(256)) == [bytes([b]) for b in range(256)]


def test_byte_level_alphabet_is_the_one_of_the_tokenizers_library() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    assert {spell_byte_level(letter) for letter in letters} == {bytes([b]) for b in range(256)}
    assert spell_byte_level("Ġä¸ĸ") == " 世".encode()


def test_added_tokens_of_a_byte_level_tokenizer_are_literal_text(tiny: Tokenizer) -> None:
    (token_id,) = tiny.encode("<tool ▁é>")
    assert tiny.token_bytes(token_id) == "<tool ▁é>".encode()


def test_ids_without_a_token_have_no_bytes(tiny: Tokenizer) -> None:
    for token_id in (tiny.vocab_size, tiny.vocab_size + 999, 2**40, -1):
        assert tiny.token_bytes(token_id) == b""
        assert tiny.token_text(token_id) == ""


def test_part_of_a_character_shows_as_replacement_text_but_keeps_its_bytes(tiny: Tokenizer) -> None:
    first, *_ = tiny.encode("世")
    assert tiny.token_bytes(first) == b"\xe4"
    assert tiny.token_text(first) == "\ufffd"


def test_sentencepiece_tokens_keep_their_space_and_spell_bytes() -> None:
    backend = sentencepiece_backend()
    spelled = TokenBytes(backend)

    def of(token: str) -> bytes:
        token_id = backend.token_to_id(token)
        assert token_id is not None
        return spelled[token_id]

    assert of("▁hi") == b" hi"
    assert of("<0xE4>") + of("<0xB8>") + of("<0x96>") == "世".encode()
    assert of("<0xZZ>") == b"<0xZZ>"
    assert of("▁▁") == b"  "
    assert of("<a▁b>") == "<a▁b>".encode()
    assert of("</s>") == b"</s>"


def test_metaspace_marks_become_spaces() -> None:
    backend = tokenizers.Tokenizer(models.Unigram([("▁one", -1.0), ("two", -2.0)], unk_id=0))
    backend.decoder = decoders.Metaspace()
    spelled = TokenBytes(backend)
    assert [spelled[0], spelled[1]] == [b" one", b"two"]


def test_other_tokenizers_give_what_a_token_adds_to_a_text() -> None:
    vocab = {"[UNK]": 0, "play": 1, "##ing": 2}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    spelled = TokenBytes(backend)
    assert spelled[1] + spelled[2] == b" playing"
    assert spelled[9] == b""


def test_without_a_decoder_the_backend_joins_by_spaces() -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    spelled = TokenBytes(backend)
    assert spelled[0] + spelled[1] == b" a b"
