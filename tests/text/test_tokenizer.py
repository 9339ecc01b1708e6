from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from moe_serve.errors import CheckpointError, ConfigError, RequestError
from moe_serve.tokenizer import Tokenizer


def test_loads_a_folder_without_bos_and_pad(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    assert tokenizer.encode("") == []
    ids = tokenizer.encode("ab 世<|end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab 世"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "ab 世<|end|>"
    assert tokenizer.eos_token_id == ids[-1]
    assert tokenizer.eos_token_id in tokenizer.special_ids
    assert tokenizer.vocab_size == 256 + 3 + 3
    assert not tokenizer.chat_template.is_available


def test_special_tokens_are_added_only_when_asked_for(tiny_folder: Path) -> None:
    hf = PreTrainedTokenizerFast.from_pretrained(tiny_folder, bos_token="<|start|>")
    start_id = hf.convert_tokens_to_ids("<|start|>")
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", start_id)]
    )
    tokenizer = Tokenizer(hf)
    assert tokenizer.encode("") == [start_id]
    assert tokenizer.encode("x")[0] == start_id
    assert start_id not in tokenizer.encode("x", add_special_tokens=False)


def test_truncation_stored_in_the_file_never_cuts_a_prompt(tiny_folder: Path) -> None:
    file = tiny_folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    file.write_text(json.dumps(content))
    assert len(Tokenizer.from_folder(tiny_folder).encode("x" * 99)) == 99


def test_ids_without_a_token_decode_to_nothing(tiny: Tokenizer) -> None:
    ids = [tiny.vocab_size, *tiny.encode("a"), -1, 2**40]
    assert tiny.decode(ids, skip_special_tokens=False) == "a"


def test_a_lone_surrogate_is_the_requests_fault(tiny: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate at character 1"):
        tiny.encode("a\ud800")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere"):
        Tokenizer.from_folder(tmp_path / "nowhere")


def test_a_folder_without_tokenizer_files_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(CheckpointError, match=f"{tmp_path} holds no tokenizer"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("content", ['{"broken', "{}", '{"version": "1.0", "model": 3}'])
def test_a_broken_tokenizer_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        Tokenizer.from_folder(tmp_path)


def test_an_unreadable_or_invalid_template_file_is_refused_at_start(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--chat-template .*none.jinja"):
        Tokenizer.from_folder(tiny_folder, tiny_folder / "none.jinja")
    bad = tiny_folder / "bad.jinja"
    bad.write_text("{% for m in messages %}\n{{ m.content }")
    with pytest.raises(ConfigError, match="line 2"):
        Tokenizer.from_folder(tiny_folder, bad)


def test_many_threads_share_one_tokenizer(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_folder)
    texts = [f"<|start|>{'ab世' * (number % 17)} {number}" for number in range(200)]

    def round_trip(text: str) -> str:
        return tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, texts)) == texts


def test_importing_the_text_side_does_not_import_torch() -> None:
    names = "tokenizer token_bytes detokenizer stop_matcher output chat choices".split()
    code = "\n".join([*(f"import moe_serve.{name}" for name in names), "import sys",
                      "print('torch' in sys.modules, 'transformers' in sys.modules)"])  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False"]


def test_reading_a_folder_does_not_import_torch(tiny_folder: Path) -> None:
    code = (
        "import pathlib, sys\n"
        "from moe_serve.tokenizer import Tokenizer\n"
        "Tokenizer.from_folder(pathlib.Path(sys.argv[1]))\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tiny_folder)], check=True)
