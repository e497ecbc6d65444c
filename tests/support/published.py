"""A merge and all that it was made of, on the Hub on loopback, as mergekit and its users leave them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pyarrow
import pyarrow.parquet
import yaml
from families import BY_NAME, TASKS, VOCABULARY, save_family, save_tokenizer
from hub_server import HubServer

from featcal_cli.hub.snapshot import Snapshot, fetch, find_origin

ROWS = 60


def resolve(name: str, *, allow_pickle: bool = False) -> Snapshot:
    """The snapshot of a model, as a command gets it."""
    return fetch(find_origin(name, allow_pickle=allow_pickle))


@dataclass(frozen=True)
class Published:
    """The repos of one merge: ORG/merged, ORG/base, ORG/bert-TASK, and the datasets ORG/TASK-rows."""

    folder: Path
    commits: Mapping[str, str]
    """By repo id."""


def write_merge(folder: Path) -> Path:
    """The files of such a merge, once for many publications."""
    save_family(folder, BY_NAME["bert"], spread=0.1)
    for name in ("base", "merged", *TASKS):
        save_tokenizer(folder / name)
    for task in TASKS:
        random = Random(task)
        texts = [" ".join(f"w{random.randrange(2, VOCABULARY)}" for _ in range(8)) for _ in range(ROWS)]
        data = folder / "data" / task / "data"
        data.mkdir(parents=True)
        table = pyarrow.table({"text": texts, "label": [number % 2 for number in range(ROWS)]})
        pyarrow.parquet.write_table(table, data / "train-00000-of-00001.parquet", row_group_size=10)
    return folder


def publish(hub: HubServer, folder: Path, org: str) -> Published:
    """Put the files of `write_merge` on the Hub, with cards that name each other by `org`."""
    place = folder / org
    commits = {}
    for name in ("base", *TASKS, "merged"):
        shutil.copytree(folder / name, place / name, dirs_exist_ok=True)
    base = f"{org}/base"
    for task in TASKS:
        write_card(place / task, base_model=base, datasets=[f"{org}/{task}-rows"], license="mit")
        commits[f"{org}/{task}-rows"] = hub.add_repo(f"{org}/{task}-rows", folder / "data" / task, kind="dataset")
        commits[f"{org}/bert-{task}"] = hub.add_repo(f"{org}/bert-{task}", place / task)
    write_card(place / "base", license="mit")
    models = [{"model": f"{org}/bert-{task}", "parameters": {"weight": 0.3}} for task in TASKS]
    config = {"merge_method": "task_arithmetic", "base_model": base, "models": models, "dtype": "float32"}
    text = yaml.safe_dump(config)
    (place / "merged" / "mergekit_config.yml").write_text(text)
    card = f"# merged\n\nThis is a merge of pre-trained language models.\n\n```yaml\n{text}```\n"
    told = {"library_name": "transformers", "tags": ["mergekit", "merge"], "license": "mit"}
    write_card(place / "merged", card, base_model=[*(f"{org}/bert-{task}" for task in TASKS), base], **told)
    for name in ("base", "merged"):
        commits[f"{org}/{name}"] = hub.add_repo(f"{org}/{name}", place / name)
    return Published(place, commits)


def write_card(folder: Path, text: str = "", **metadata: object) -> None:
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(metadata)}---\n{text}")


def change_config(folder: Path, **values: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
