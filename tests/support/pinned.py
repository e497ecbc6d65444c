"""What a rebuild must leave equal: records it of a checkout, and compares two records.

    python tests/support/pinned.py record FOLDER [--checkout PATH] [--workers N]
    python tests/support/pinned.py compare FOLDER FOLDER

It knows nothing of how the package and its tests are laid out. Commands are processes of this interpreter that find the
package in the checkout, schemas are of classes that some module has under their name, and messages are what the test of
bad input reads, whichever file it is in: as a plugin of pytest, this file writes them down.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pinned_jobs import Job

CHECKOUT = Path(__file__).resolve().parents[2]
COMMANDS = ("calibrate", "inspect-drift", "evaluate", "recipes", "modules", "demo")
BAD_INPUT = "test_bad_input_is_one_clear_message"
"""The test that goes through all tables of bad input."""
SCHEMAS = """
import dataclasses, importlib, json, pkgutil, pydantic, featcal_cli
found = {}
for module in pkgutil.walk_packages(featcal_cli.__path__, "featcal_cli."):
    if not module.name.endswith("__main__"):
        for name, value in vars(importlib.import_module(module.name)).items():
            if name in ("Draft", "Recipe", "Report", "Inspection", "Evaluation") and isinstance(value, type):
                if dataclasses.is_dataclass(value) or issubclass(value, pydantic.BaseModel):
                    found.setdefault(name, pydantic.TypeAdapter(value).json_schema())
print(json.dumps(dict(sorted(found.items())), indent=2, ensure_ascii=False))
"""
"""Prints the schemas of what is read and written as JSON."""
CHANGING = [
    (r'("(?:\w*seconds|peak_\w*bytes|expert_bytes_read)": )[\d.e+-]+', r"\g<1>0"),
    (
        r'("(?:featcal|featcal_version|transformers_version|python|torch|transformers|platform|run|time)": )"[^"]*"',
        r'\1""',
    ),
    (r'("reports": )\[[^]]*\]', r"\1[]"),
    (r'(": "\d+ )\d{19}(?=[ "])', r"\g<1>0"),  # when a file was written
    (
        r"(?m)^This took .* on (\w+), .* MiB of memory at the peak, and (.*) \(torch .*\)\.$",
        r"This took X on \1, and \2",
    ),
    (r"(?m)^(memory +about|time +about) \S+( GB)?", r"\1 X\2"),
    (r"featcal \d+\.\d+\.\d+", "featcal X"),
    (r"(?m)^· [^\n]*, \d+:\d\d:\d\d\n", ""),  # said where something takes long
    (r'(green/(?:README\.md|adapter_config\.json)": "\d+ 0 )\w+', r"\1X"),  # they hold the path of the base
    (r'(\["(?:seconds|peak_\w+)",)[\d.e+-]+', r"\g<1>0"),
    (r"127\.0\.0\.1:\d{4,5}", "127.0.0.1:PORT"),
]
"""Patterns of what is another thing in every run or on every machine, and what stands for them."""


@dataclass(frozen=True)
class Recorder:
    """Runs commands of one checkout in one place, and writes down what they leave."""

    checkout: Path
    place: Path
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """What a command finds in its environment: no Hub, and caches of its own."""
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "LD_LIBRARY_PATH")}
        own = {name: str(self.place / name) for name in ("HOME", "HF_HOME", "FEATCAL_CACHE", "XDG_CACHE_HOME")}
        offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1"}
        paths = f"{self.checkout}{os.pathsep}{self.place / 'plugin'}"
        return {**kept, **own, **offline, "COLUMNS": "100", "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, name: str, content: bytes) -> None:
        """Put it into the record; of a text without what is another in every run."""
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(normalise(content, self.checkout, self.place))

    def run(self, name: str, where: Path, *arguments: str) -> list[str]:
        """Record a command's output as a text of this name; in a list, its complaint if it did not go well."""
        line = [sys.executable, *arguments]
        done = subprocess.run(line, cwd=where, env=self.environment, capture_output=True, timeout=600)
        shown = " ".join(arguments) if len(arguments) > 2 else "…"
        head = f"$ {shown}\nexit code {done.returncode}\n".encode()
        self.write(f"{name}.txt", head + b"--- stdout\n" + done.stdout + b"--- stderr\n" + done.stderr)
        return [f"{name}: exit code {done.returncode}\n{done.stderr.decode()[-2000:]}"] if done.returncode else []

    def do(self, job: Job) -> list[str]:
        """Record a job: sums of its inputs, its output, and every file that it leaves. Returns complaints."""
        where = self.place / job.name
        given = set(where.rglob("*"))
        sums = [f"{sum_of(file)}  {file.relative_to(where)}" for file in sorted(given) if file.suffix == ".safetensors"]
        self.write(f"{job.name}/inputs.txt", "\n".join(sums).encode())
        complaints = []
        for number, line in enumerate(job.commands, 1):
            complaints += self.run(f"{job.name}/{number}-{line[0]}", where, "-m", "featcal_cli", *line)
        for file in sorted(set(where.rglob("*")) - given):
            if file.is_file():
                self.write(f"{job.name}/{file.relative_to(where)}", file.read_bytes())
        return complaints

    def ask(self) -> list[str]:
        """Record help, version, recipes and schemas. Returns complaints."""
        complaints = self.run("schemas", self.place, "-c", SCHEMAS)
        for name in ("", *COMMANDS):
            complaints += self.run(
                f"help/{name or 'featcal'}", self.place, "-m", "featcal_cli", *name.split(), "--help"
            )
        for name in ("", "demo", "recipe.schema.json"):
            complaints += self.run(
                f"recipes/{name or 'all'}", self.place, "-m", "featcal_cli", "recipes", *name.split()
            )
        return complaints

    def refuse(self, workers: int) -> list[str]:
        """Record the messages of bad input. Returns complaints."""
        plugin = self.place / "plugin"
        plugin.mkdir()
        shutil.copy(__file__, plugin / "pinned_messages.py")
        files = [file for file in (self.checkout / "tests").rglob("*.py") if f"def {BAD_INPUT}(" in file.read_text()]
        options = ["-k", BAD_INPUT, "-m", "survive or not survive", "-p", "no:cacheprovider", "-p", "pinned_messages"]
        options += ["-n", str(workers if workers > 1 else 0), "--basetemp", str(self.place / "tests")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *map(str, files), *options],
            cwd=self.checkout,
            env={**self.environment, "COLUMNS": "9999", "PINNED": f"{self.folder}:{self.place}"},
            capture_output=True,
            text=True,
        )
        return [f"{BAD_INPUT}: {done.stdout[-3000:]}{done.stderr[-1000:]}"] if done.returncode or not files else []


def pytest_configure() -> None:
    """As a plugin: write down each message that a test reads, with the exit code that it caught."""
    folder, place = map(Path, os.environ["PINNED"].split(":"))
    checkout, patch = Path.cwd(), pytest.MonkeyPatch()
    raises, read = pytest.raises, pytest.CaptureFixture.readouterr
    caught: list[Any] = []

    def remember(*arguments: Any, **options: Any) -> Any:
        caught[:] = [raises(*arguments, **options)]
        return caught[0]

    def write(capture: pytest.CaptureFixture[str]) -> Any:
        written = read(capture)
        if caught and written.err:
            code = getattr(caught.pop().excinfo.value, "code", None)
            name = os.environ["PYTEST_CURRENT_TEST"].rpartition("[")[2].partition("]")[0]
            message = re.sub(rf"{place}/t/\w{{8}}", "<PLACE>", written.err)
            file = folder / "bad-input" / f"{name}.txt"
            file.parent.mkdir(parents=True, exist_ok=True)
            text = f"exit code {code}\n{message}"
            file.write_bytes(normalise(text.encode(errors="surrogateescape"), checkout, place))
        return written

    patch.setattr(pytest, "raises", remember)
    patch.setattr(pytest.CaptureFixture, "readouterr", write)


@pytest.fixture
def tmp_path(request: pytest.FixtureRequest) -> Path:
    """As a plugin: the test's folder, whose path is as long in every run, for messages are cut to a length."""
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:8]
    folder = Path(os.environ["PINNED"].split(":")[1]) / "t" / name
    folder.mkdir(parents=True)
    return folder


def normalise(content: bytes, checkout: Path, place: Path) -> bytes:
    """A text without what is another thing in every run; other bytes as they are."""
    try:
        text = content.decode()
    except UnicodeDecodeError:
        return content
    if "\0" in text:
        return content
    text = text.replace(str(place), "<PLACE>")
    text = re.sub(rf"{re.escape(str(checkout))}(/\w+)*/recipes\b", "<RECIPES>", text)
    text = text.replace(str(checkout), "<CHECKOUT>")
    for pattern, instead in CHANGING:
        text = re.sub(pattern, instead, text)
    return text.encode()


def sum_of(file: Path) -> str:
    """The file's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def record(folder: Path, checkout: Path, workers: int) -> list[str]:
    """Write everything into an empty folder. Returns complaints: what did not go as it should."""
    folder.mkdir(parents=True)
    from pinned_jobs import jobs

    with (
        tempfile.TemporaryDirectory(prefix="featcal-pinned-", dir="/tmp") as place,
        ThreadPoolExecutor(workers) as pool,
    ):
        recorder = Recorder(checkout, Path(place).resolve(), folder)
        chosen = jobs(checkout)
        for job in chosen:  # one by one, as all draw from one generator of random numbers
            (recorder.place / job.name).mkdir()
            job.prepare(recorder.place / job.name)
        found = [*pool.map(recorder.do, chosen), recorder.ask(), recorder.refuse(workers)]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    (folder / "SHA256SUMS").write_text("".join(f"{sum_of(file)}  {file.relative_to(folder)}\n" for file in files))
    return [complaint for complaints in found for complaint in complaints]


def compare(first: Path, second: Path) -> Iterator[str]:
    """What differs. A bad input that has another name, and the same message, does not."""
    one, two = (
        {
            str(path.relative_to(folder)): path
            for path in folder.rglob("*")
            if path.is_file() and path.name != "SHA256SUMS"
        }
        for folder in (first, second)
    )
    gone, new = sorted(one.keys() - two.keys()), sorted(two.keys() - one.keys())
    for name in gone.copy():
        same = [other for other in new if "bad-input/" in name and two[other].read_bytes() == one[name].read_bytes()]
        if same and same[0].startswith("bad-input/"):
            gone.remove(name)
            new.remove(same[0])
    yield from (f"only in {first}: {name}" for name in gone)
    yield from (f"only in {second}: {name}" for name in new)
    for name in sorted(one.keys() & two.keys()):
        if one[name].read_bytes() != two[name].read_bytes():
            yield f"differs: {name}\n" + "\n".join(islice(differences(one[name], two[name]), 30))


def differences(one: Path, two: Path) -> Iterator[str]:
    """How two files differ: lines of a text, tensors of a model, else their sums."""
    if one.suffix == ".safetensors":
        from safetensors.torch import load_file

        tensors, others = load_file(one), load_file(two)
        for name in sorted(tensors.keys() | others.keys()):
            tensor, other = tensors.get(name), others.get(name)
            if tensor is None or other is None or tensor.shape != other.shape:
                yield f"  {name}: {tensor is not None and [*tensor.shape]}, {other is not None and [*other.shape]}"
            elif not tensor.equal(other):
                yield f"  {name}: by {float((other - tensor).norm() / tensor.norm()):.1e} of its norm"
        return
    try:
        before, after = one.read_text().splitlines(), two.read_text().splitlines()
    except UnicodeDecodeError:
        yield f"  {sum_of(one)}, {sum_of(two)}"
        return
    yield from (line[:300] for line in difflib.unified_diff(before, after, lineterm="", n=0))


def main() -> int:
    """The command line; returns 1 where something went wrong or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("folder", type=Path)
    recording.add_argument("--checkout", type=Path, default=CHECKOUT)
    recording.add_argument("--workers", type=int, default=2)
    comparing = commands.add_parser("compare")
    comparing.add_argument("folders", type=Path, nargs=2)
    chosen = parser.parse_args()
    if chosen.command == "record":
        found = record(chosen.folder.resolve(), chosen.checkout.resolve(), chosen.workers)
    else:
        found = list(compare(*chosen.folders))
    sys.stdout.write("".join(f"{each}\n" for each in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
