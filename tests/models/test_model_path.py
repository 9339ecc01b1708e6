"""From the name of a model to its folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import moe_serve.model_path
from moe_serve.errors import CheckpointError
from moe_serve.model_path import resolve_model


@pytest.fixture
def hub(monkeypatch):
    """What the hub is asked for; set `.answer` to a folder or an error."""

    class Hub:
        answer: object = "/cached"
        asked: dict[str, object] | None = None

        def download(self, repo_id: str, **options: object) -> str:
            self.asked = {"repo_id": repo_id, **options}
            if isinstance(self.answer, Exception):
                raise self.answer
            return str(self.answer)

    hub = Hub()
    monkeypatch.setattr(moe_serve.model_path.huggingface_hub, "snapshot_download", hub.download)
    return hub


def test_a_folder_is_itself(tmp_path: Path, hub) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert hub.asked is None


def test_builtin_lies_in_the_package(hub) -> None:
    assert resolve_model("builtin") == Path(moe_serve.model_path.__file__).parent / "builtin"
    assert hub.asked is None


def test_a_hub_id_is_fetched_at_its_revision_and_only_what_is_needed(hub) -> None:
    assert resolve_model("some/model", "v1") == Path("/cached")
    assert hub.asked is not None
    assert (hub.asked["repo_id"], hub.asked["revision"]) == ("some/model", "v1")
    assert "*.safetensors" in hub.asked["allow_patterns"]
    assert not any("bin" in pattern for pattern in hub.asked["allow_patterns"])


@pytest.mark.parametrize("model", ["/no/such/folder", "./none", "../none", "~/none", "a/b/c"])
def test_a_path_that_is_not_there_is_never_looked_for_on_the_hub(hub, model: str) -> None:
    with pytest.raises(CheckpointError, match=f"{model}: no such folder"):
        resolve_model(model)
    assert hub.asked is None


def test_a_file_is_refused(tmp_path: Path, hub) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointError, match="give the folder"):
        resolve_model(str(file))


@pytest.mark.parametrize("error", [OSError("no route"), ValueError("bad id")])
def test_a_hub_failure_is_told_with_a_hint(hub, error: Exception) -> None:
    hub.answer = error
    with pytest.raises(CheckpointError, match=f"some/model at revision v1: .*check.*{error}"):
        resolve_model("some/model", "v1")


def test_offline_only_the_cache_is_used(tmp_path: Path) -> None:
    code = (
        "from moe_serve.model_path import resolve_model\n"
        "from moe_serve.errors import CheckpointError\n"
        "try:\n    resolve_model('some/model')\n"
        "except CheckpointError as error:\n    print(error)\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        env={"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": ""},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "some/model: no such folder" in out
    assert "HF_HUB_OFFLINE is set and the model is not in the cache" in out


def test_the_path_is_found_without_torch_or_transformers() -> None:
    code = "import sys, moe_serve.model_path; print({'torch', 'transformers'} & set(sys.modules))"
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert out.strip() == "set()"
