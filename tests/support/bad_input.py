"""What a bad input is: a job that would go well, spoiled in one place, and the words that its message must have."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

import pytest
from families import BY_NAME, save_family, save_tokenizer
from hub_server import HubServer
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

Arguments = dict[str, object]


@dataclass(frozen=True)
class Stage:
    """A good job on disk, about to be spoiled."""

    folder: Path
    """merged, base, red, green, blue and red.safetensors of a tiny BERT; under vit/ the same of a ViT."""
    hub: HubServer
    patch: pytest.MonkeyPatch

    def write(self, path: str, content: str | bytes) -> Path:
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    def change(self, path: str, **values: object) -> None:
        file = self.folder / path
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    def publish(self, name: str, source: str, kind: str = "model") -> str:
        """Put a folder on the Hub; return its name there."""
        self.hub.add_repo(name, self.folder / source, kind=kind)
        return name


LAUGHS = "a0: &a0 [v]\n" + "\n".join(f"a{n}: &a{n} [{f'*a{n - 1}, ' * 9}]" for n in range(1, 12))
MERGES = "a0: &a0 {k: v}\n" + "\n".join(f"a{n}: &a{n} {{<<: [{f'*a{n - 1}, ' * 9}]}}" for n in range(1, 12))
"""YAML that unfolds to more values than any memory holds, by aliases and by merge keys."""
Arrange = Callable[[Stage], Arguments | None]
"""Spoils the job, and returns what of the good arguments is to be another, if any; None leaves an argument out."""
Case = tuple[Arrange, list[str]]
"""With the words that the message must have."""
P = ParamSpec("P")


def case(spoil: Callable[Concatenate[Stage, P], Arguments | None]) -> Callable[P, Arrange]:
    """Of a function of the stage and of more, one of what is more."""
    return lambda *args, **kwargs: lambda stage: spoil(stage, *args, **kwargs)


def options(files: Mapping[str, str | bytes] | None = None, /, **given: object) -> Arrange:
    """Nothing but other arguments, and files that are there before; `max_drift` is --max-drift, and in a value (or the
    values of a list) {} is the stage's folder."""

    def arrange(stage: Stage) -> Arguments:
        for path, content in (files or {}).items():
            stage.write(path, content)
        return {_spell(name): _fill(value, stage.folder) for name, value in given.items()}

    return arrange


def _fill(value: Any, folder: Path) -> Any:
    if isinstance(value, list):
        return [_fill(item, folder) for item in value]
    return value.replace("{}", str(folder)) if isinstance(value, str) else value


def _spell(name: str) -> str:
    if name in ("merged", "command"):
        return name
    return f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}"


def save_stage(folder: Path) -> None:
    save_family(folder, BY_NAME["bert"], examples=6)
    save_family(folder / "vit", BY_NAME["vit"], examples=6)
    save_tokenizer(folder / "base")
    ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder / "vit" / "base")


def good_arguments(folder: Path) -> Arguments:
    models = {"merged": folder / "merged", "--base": folder / "base", "--expert": f"red={folder / 'red'}"}
    return {**models, "--data": f"red={folder / 'red.safetensors'}", "-n": 4, "-o": folder / "out"}


def of_images(stage: Stage, data: object) -> Arguments:
    vit = stage.folder / "vit"
    return {"merged": vit / "merged", "--base": vit / "base", "--expert": f"red={vit / 'red'}", "--data": f"red={data}"}


def files_under(*folders: Path) -> Mapping[Path, tuple[int, int]]:
    """Every path; with the time at which a file was written, and its size."""
    found = {path: path.lstat() for folder in folders for path in folder.rglob("*")}
    return {path: (0, 0) if path.is_dir() else (stat.st_mtime_ns, stat.st_size) for path, stat in found.items()}
