"""The files of one saved step, sorted by what their names say; none missing in between.

Names are those of DeepSpeed 0.19's `runtime/engine.py` (`_get_ckpt_name`, `_get_zero_ckpt_name`,
`_get_expert_ckpt_name`, `_get_optimizer_ckpt_name`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from moe_serve.errors import CheckpointError

LATEST_NAME = "latest"
_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(
    r"(?:bf16_|fp16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt"
)
_EXPERT = re.compile(
    r"layer_(?P<layer>\d+)_expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt"
)
# Adam's moments of the experts; the weights are in the files of the experts.
_EXPERT_OPTIMIZER = re.compile(r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelParallelFiles:
    """Of one model-parallel rank. `models`: one, or one a data-parallel rank where ZeRO-3 has
    parted the weights too. `optimizers`: one a data-parallel rank, none without ZeRO.
    """

    rank: int
    is_parted: bool
    models: tuple[Path, ...]
    optimizers: tuple[Path, ...]
    # (layer, expert) -> file
    experts: Mapping[tuple[int, int], Path]


def is_deepspeed(folder: Path) -> bool:
    """Whether a training with DeepSpeed has saved there."""
    return (folder / LATEST_NAME).is_file()


def step_folder(folder: Path, tag: str | None = None) -> Path:
    """The folder of the step `tag`; None is the one that `latest` names."""
    origin = f"--tag {tag}" if tag is not None else f"{folder / LATEST_NAME}"
    name = _latest(folder / LATEST_NAME) if tag is None else tag
    found = sorted(path.parent.name for path in folder.glob("*/*_states.pt"))
    there = ", ".join(dict.fromkeys(found)) or "none"
    if not name or name != Path(name).name or not (folder / name).is_dir():
        raise CheckpointError(
            f"{origin}: names the step {name!r}, which is no folder in {folder}; there: {there}"
        )
    return folder / name


def _latest(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error


def find_files(step: Path) -> list[ModelParallelFiles]:
    """By model-parallel rank. Raises `CheckpointError` for what is missing, twice or unknown."""
    models: dict[int, dict[int, Path]] = {}
    optimizers: dict[int, dict[int, Path]] = {}
    experts: dict[int, dict[tuple[int, int], Path]] = {}
    parted: dict[bool, Path] = {}
    for file in sorted(step.glob("*_states.pt")):
        if match := _EXPERT.fullmatch(file.name):
            place = int(match["layer"]), int(match["expert"])
            experts.setdefault(int(match["mp"]), {})[place] = file
        elif match := _MODEL.fullmatch(file.name):
            parted.setdefault(match["dp"] is not None, file)
            _put(models.setdefault(int(match["mp"]), {}), int(match["dp"] or 0), file)
        elif match := _OPTIMIZER.fullmatch(file.name):
            _put(optimizers.setdefault(int(match["mp"]), {}), int(match["dp"]), file)
        elif not _EXPERT_OPTIMIZER.fullmatch(file.name):
            raise CheckpointError(
                f"{file}: a layout that is not read (known: mp_rank_*, zero_pp_rank_* and "
                "layer_*_expert_* files; no pipeline stages)"
            )
    _check_kinds(step, parted, models, optimizers, experts)
    return [
        ModelParallelFiles(
            rank=rank,
            is_parted=True in parted,
            models=_in_order(step, f"model states of mp_rank_{rank:02d}", models[rank]),
            optimizers=_in_order(step, f"optim states of mp_rank_{rank:02d}", optimizers.get(rank)),
            experts=_checked_experts(step, experts.get(rank, {})),
        )
        for rank in sorted(models)
    ]


def _check_kinds(
    step: Path,
    parted: Mapping[bool, Path],
    models: Mapping[int, object],
    optimizers: Mapping[int, object],
    experts: Mapping[int, object],
) -> None:
    """Of one training, with the same mp ranks in each kind of files."""
    if not models:
        raise CheckpointError(f"{step}: has no file *mp_rank_00_model_states.pt")
    if len(parted) > 1:
        raise CheckpointError(
            f"{step}: holds {parted[True].name} of ZeRO-3 and {parted[False].name} of another "
            "training; expected one checkpoint a folder"
        )
    for name, by_rank in ("optim", optimizers), ("expert", experts):
        if by_rank and by_rank.keys() != models.keys():
            raise CheckpointError(
                f"{step}: has {name} files of the mp ranks {sorted(by_rank)} and model files of "
                f"{sorted(models)}; expected the same"
            )
    _refuse_gaps(step, "mp_rank", models)


def _put(files: dict[int, Path], rank: int, file: Path) -> None:
    if rank in files:
        raise CheckpointError(
            f"{file}: the same rank as {files[rank].name}; expected one file a rank"
        )
    files[rank] = file


def _in_order(step: Path, what: str, files: Mapping[int, Path] | None) -> tuple[Path, ...]:
    if not files:
        return ()
    _refuse_gaps(step, f"{what}: zero_pp_rank", files)
    return tuple(files[rank] for rank in sorted(files))


def _checked_experts(
    step: Path, files: Mapping[tuple[int, int], Path]
) -> Mapping[tuple[int, int], Path]:
    _refuse_gaps(step, "layer", {layer for layer, _ in files})
    for layer in {layer for layer, _ in files}:
        _refuse_gaps(step, f"layer_{layer}_expert", _experts_of(files, layer))
    return files


def _experts_of(files: Iterable[tuple[int, int]], layer: int) -> list[int]:
    return [expert for one, expert in files if one == layer]


def _refuse_gaps(step: Path, what: str, numbers: Iterable[int]) -> None:
    there = set(numbers)
    missing = list(_missing(there))
    if missing:
        raise CheckpointError(
            f"{step}: {what} {', '.join(map(str, missing))} is missing; expected all of 0 to "
            f"{max(there)}"
        )


def _missing(there: set[int]) -> Iterator[int]:
    return (number for number in range(max(there, default=-1) + 1) if number not in there)
