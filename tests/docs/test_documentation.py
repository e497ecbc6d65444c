"""What the README and docs/ tell a reader to type works, and what is generated of them is up to date."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from runpy import run_path
from typing import Any, NamedTuple, get_args

import jsonschema
import pytest
import yaml
from command_line import Capsys, run_line, succeed
from hub_server import HubServer
from published import write_card
from recipe_world import World, save_model
from safetensors.torch import load_file, save_file
from transformers import Wav2Vec2Config, Wav2Vec2Model

from featcal_cli.data.examples import draw_examples
from featcal_cli.data.files import AUDIO_FILES, IMAGE_FILES
from featcal_cli.data.preprocessing import Target
from featcal_cli.recipe.data_formats import FORMATS, TABLE_FILES
from featcal_cli.recipe.reading import find_recipe, read_draft, shipped_recipes
from featcal_cli.recipe.schema import Data, Role

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "torchrun": "tests/distributed/test_ranks.py",
    "hf": "needs an account",
    "gh": "needs an account",
    "MERGED=user/merged": "tests/docs/test_pipelines.py",
    "python": "benchmarks take hours",
    "^C": "what the terminal shows",
    "·": "what the terminal shows",
    "error:": "tests/docs/test_troubleshooting.py and the tests of messages",
    "in:": "the same",
    "fix:": "the same",
}
"""First words of lines in blocks of commands that are not run here, and what is known of them."""
RANKS = ["featcal", "--gpus"]
"""tests/distributed/test_ranks.py runs it."""
DEMO = ["featcal", "demo"]
"""tests/integration/test_inspect_cli.py runs it, which takes longer than all other commands."""


BASE = "openai/clip-vit-base-patch32"
TASKS = {"mnist": "ylecun/mnist", "svhn": "ufldl-stanford/svhn"}


class Block(NamedTuple):
    """Commands that follow each other."""

    line: int
    commands: list[str]


def pages() -> list[Path]:
    """Everything that a reader reads, but where commands are there to fail."""
    named = sorted((ROOT / "docs").glob("*.md"))
    return [ROOT / "README.md", *(page for page in named if page.stem != "troubleshooting")]


def find_blocks(page: Path) -> Iterator[Block]:
    """The indented blocks of a page whose commands are to be run, with what a backslash continues in one line."""
    fenced, block = False, Block(1, [])
    for number, line in enumerate([*page.read_text(encoding="utf-8").splitlines(), "."], start=1):
        if line.startswith("```"):
            fenced = not fenced
        indented = line.startswith("    ") and line.strip() and not fenced
        if indented and block.commands and block.commands[-1].endswith("\\"):
            block.commands[-1] = f"{block.commands[-1][:-1].strip()} {line.strip()}"
        elif indented and not line.strip().startswith(("|", "-", "#")):
            block.commands.append(line.strip())
        elif not indented and block.commands:
            yield block
            block = Block(number, [])


def new_blocks(page: Path) -> Iterator[Block]:
    """Those with a command that neither this page nor one before it has told already."""
    known: set[str] = set()
    for each in pages():
        for block in find_blocks(each):
            if each == page and not known.issuperset(block.commands):
                yield block
            known |= set(block.commands)


def to_run(block: Block) -> list[list[str]]:
    lines = [shlex.split(command, comments=True) for command in block.commands if command.split()[0] not in ELSEWHERE]
    return [line for line in lines if line and line[:2] not in (DEMO, RANKS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models that the pages talk of: two experts and their mean, with cards that say so."""
    folder = tmp_path_factory.mktemp("models")
    for number, task in enumerate(TASKS):
        save_model(folder / f"clip-{task}", "clip", str(number))
        write_card(folder / f"clip-{task}", base_model=BASE, datasets=[TASKS[task]], license="mit")
    files = [folder / f"clip-{task}" / "model.safetensors" for task in TASKS]
    experts = [load_file(file) for file in files]
    for name, tensor in experts[1].items():  # two of a kind, so that their mean is a merge worth having
        tensor.mul_(0.2).add_(experts[0][name], alpha=0.8)
    save_file(experts[1], files[1], metadata={"format": "pt"})
    shutil.copytree(folder / "clip-mnist", folder / "merged")
    mean = {name: (tensor + experts[1][name]) / 2 for name, tensor in experts[0].items()}
    save_file(mean, folder / "merged" / "model.safetensors", metadata={"format": "pt"})
    models = [{"model": f"user/clip-{task}", "parameters": {"weight": 0.5}} for task in TASKS]
    merge = {"merge_method": "task_arithmetic", "base_model": BASE, "models": models}
    (folder / "merged" / "mergekit_config.yml").write_text(yaml.safe_dump(merge))
    (folder / "merged" / "README.md").write_text("# A merge\n")
    return folder


@pytest.fixture
def world(hub: HubServer, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose commands find these models, data, and the repos of the shipped recipes that pages use."""
    found = World(hub, tmp_path / "world")
    found.publish(read_draft(find_recipe("clip-vit-b32-8"), {}))
    for name in ("clip-mnist", "clip-svhn", "merged"):
        hub.add_repo(f"user/{name}", files / name)
    for name in ("another-merge", "other-merge", "this-week", "last-week"):
        hub.add_repo(f"user/{name}", files / "merged")
    monkeypatch.setenv("HF_TOKEN", hub.add_token("user", "write"))
    return tmp_path


def prepare(hub: HubServer, files: Path, text: str, capsys: Capsys) -> None:
    """Put what a block takes for granted here: a recipe, a merge and its calibrated form, an earlier push."""
    rest: dict[str, Any] = {"evaluate": {"prompts": ["a photo of {}"]}}
    tasks = {task: {"expert": f"user/clip-{task}", "data": {"dataset": TASKS[task]}, **rest} for task in TASKS}
    tasks["svhn"]["data"]["config"] = "cropped_digits"
    recipe = {"merged": "user/merged", "base": BASE, "tasks": tasks, "calibration": {"examples": 4}}
    Path("mine.yaml").write_text(yaml.safe_dump(recipe))
    if "./my-merge" in text:
        shutil.copytree(files / "merged", "my-merge")
    if "./my-merge-featcal" in text:
        succeed(capsys, "calibrate", {"-r": "mine.yaml", "-o": "my-merge-featcal", "-q": ""})
    if "./clip-vit-b32-8-featcal" in text and "calibrate -r clip-vit-b32-8" not in text:
        shutil.copytree(files / "merged", "clip-vit-b32-8-featcal")
    if "user/merged-featcal" in text and "--push-to user/merged-featcal" not in text:
        hub.add_repo("user/merged-featcal", files / "merged")


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_what_a_page_says_to_type_works(
    page: Path, world: Path, files: Path, hub: HubServer, capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for block in new_blocks(page):
        if not (commands := to_run(block)):
            continue
        hub.repos.pop(("model", "user/merged-featcal"), None)
        folder = world / f"line-{block.line}"
        folder.mkdir()
        monkeypatch.chdir(folder)
        prepare(hub, files, "\n".join(block.commands), capsys)
        for command in commands:
            try_line(command, capsys, f"{page.name}, after line {block.line}: {shlex.join(command)}")


def try_line(words: list[str], capsys: Capsys, told: str) -> None:
    """One command; what another program would read of its output, a file gets."""
    if words[0] != "featcal":
        assert words[0] == "mkdir", f"{told}: is this run, or is it in ELSEWHERE?"
        subprocess.run(words, check=True)
        return
    command, _, after = " ".join(map(shlex.quote, words)).partition(" '|' ")[0].partition(" '>' ")
    run = run_line(capsys, shlex.split(command)[1:])
    assert run.code == 0, f"{told}\n{run.stderr}"
    if after:
        Path(after).write_text(run.stdout, encoding="utf-8")


def test_the_python_of_the_page_works(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world)
    for code in re.findall(r"```python\n(.*?)```", (ROOT / "docs/api.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(compile(code, "docs/api.md", "exec"), {})
    assert (world / "calibrated" / "model.safetensors").is_file()


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_what_a_page_says_to_type_fits_a_terminal(page: Path) -> None:
    fence = ""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fence = "" if fence else line
        elif fence in ("```sh", "```python", "```yaml") or (not fence and line.startswith("    ")):
            assert len(line.removeprefix("" if fence else "    ")) <= 80, line


@pytest.mark.parametrize(
    ("file", "write"),
    {
        "docs/cli.md": "describe_commands",
        "docs/recipe.md": "describe_recipe",
        "recipes/recipe.schema.json": "write_schema",
    }.items(),
)
def test_what_is_generated_is_up_to_date(file: str, write: str) -> None:
    made = run_path(str(ROOT / "docs" / "generate.py"))[write]()
    assert (ROOT / file).read_text(encoding="utf-8") == made, "run: python docs/generate.py"


@pytest.mark.parametrize(
    "page", [file for place in (".", "docs", "benchmarks") for file in sorted((ROOT / place).glob("*.md"))],
    ids=lambda page: page.stem,
)  # fmt: skip
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        # as GitHub makes them of headings
        assert not anchor or anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, (
            target
        )


def test_what_contributing_names_is_there() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = {found for found in re.findall(r"`([\w.*]+/[\w.*/]*)", page) if found != "dist/"}
    assert len(named) > 25
    for path in named:
        assert any(list(folder.glob(path)) for folder in (ROOT, ROOT / "featcal_cli")), path


@pytest.mark.parametrize("file", shipped_recipes(), ids=lambda file: file.stem)
def test_the_schema_knows_the_shipped_recipes(file: Path) -> None:
    schema = ROOT / "recipes" / "recipe.schema.json"
    jsonschema.validate(yaml.safe_load(file.read_text()), json.loads(schema.read_text()))


PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SOUND = Wav2Vec2Model(Wav2Vec2Config(**SIZES, conv_dim=(8,), conv_stride=(320,), conv_kernel=(400,)))


def read_endings(row: str) -> list[str]:
    """The endings in the table's row that begins so."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row}")]
    return list(dict.fromkeys(re.findall(r"\.[a-z]\w+", line)))


def test_endings_in_the_table_are_those_that_are_read() -> None:
    """tests/unit/data/ reads files of them."""
    read = {".csv", ".tsv", ".jsonl", ".json", ".parquet", ".arrow"}
    assert set(read_endings("folder of images")) == set(IMAGE_FILES)
    assert set(read_endings("folder of recordings")) <= set(AUDIO_FILES)
    assert set(read_endings("folder of data files")) == read <= set(TABLE_FILES)
    assert set(read_endings("one file")) == {*read, ".txt"} <= set(FORMATS)


def test_every_role_is_in_the_table() -> None:
    (table,) = re.findall(r"\| role \|.*?\n\n", PAGE, re.DOTALL)
    assert re.findall(r"`(\w+)`", table) == list(get_args(Role))


def test_the_program_writes_inputs_that_the_model_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/data.md", "exec"), {})
    drawn = draw_examples("tones", Data(path="tones.safetensors"), Target(SOUND), count=256, seed=0)
    assert (len(drawn.fitted), len(drawn.selection), len(drawn.held_out)) == (256, 32, 32)
    batch = drawn.cut(2).fitted[0]
    assert len(SOUND(**batch).last_hidden_state) == 2
    assert batch["attention_mask"].sum(1).tolist() == [4010, 4020]
