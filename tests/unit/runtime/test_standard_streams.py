"""However a command is started, it ends with one message or quietly: streams that are closed, full or read by nobody, a
folder that is gone, an encoding that knows no letters, a package that cannot be imported, processes without GPUs. And
what it found is said before torch is imported, which takes seconds."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
from command_line import featcal
from families import BY_NAME, save_family
from hub_server import HubServer
from published import publish, write_card

from featcal_cli.__main__ import share_cores
from featcal_cli.runtime import distributed
from featcal_cli.runtime.errors import RecipeError
from featcal_cli.runtime.process import NAMES

COMMANDS = {
    "recipes": "recipes",
    "one recipe": "recipes demo",
    "version": "--version",
    "help": "calibrate --help",
    "modules as JSON": "modules JOB/merged --json",
    "calibrate": "calibrate -r JOB/job.yaml -o out --overwrite",
    "an error": "modules JOB/nothing",
}
PLAIN = {"LC_ALL": "POSIX"}
NOWHERE = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "HF_HOME", "FEATCAL_CACHE"), "/proc/nowhere")
"""Places that cannot be written are not missed if unused."""
NARROW = {"PYTHONIOENCODING": "latin-1", "TERM": "dumb", "NO_COLOR": "1", "COLUMNS": "20"}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and all that it names; its own name is no ASCII."""
    folder = tmp_path_factory.mktemp("job") / "mödel λ"
    recipe = save_family(folder, BY_NAME["bert"]).only(1).recipe()
    (folder / "job.yaml").write_text(json.dumps(recipe, ensure_ascii=False), encoding="utf-8")
    return folder


def run(line: str, job: Path, folder: Path, streams: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """A command in a shell, which redirects its streams."""
    words = [f"'{word.replace('JOB', str(job))}'" for word in line.split()]
    shell = f"'{sys.executable}' -m featcal_cli {' '.join(words)} {streams}"
    return subprocess.run(
        ["bash", "-c", shell],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        timeout=120,
    )


SLOW = [pytest.param(name, marks=pytest.mark.survive) for name in COMMANDS if name not in ("recipes", "one recipe")]


@pytest.mark.parametrize("name", ["recipes", *SLOW])
def test_a_reader_that_goes_is_no_bug(job: Path, tmp_path: Path, name: str) -> None:
    done = run(COMMANDS[name], job, tmp_path, "| true; exit ${PIPESTATUS[0]}")
    assert done.returncode == (2 if name == "an error" else 141), done.stderr
    assert "bug" not in done.stderr and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


@pytest.mark.survive
@pytest.mark.parametrize(
    ("name", "stream"), [*product(["one recipe", "calibrate", "an error"], [">"]), ("an error", "2>")]
)
def test_messages_that_nobody_can_read_stop_nothing_and_keep_their_code(
    job: Path, tmp_path: Path, name: str, stream: str
) -> None:
    done = run(COMMANDS[name], job, tmp_path, f"{stream}/dev/full")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and done.stderr.count("error:") == (stream == ">"), done.stderr


@pytest.mark.parametrize("name", ["recipes", pytest.param("calibrate", marks=pytest.mark.survive)])
def test_a_folder_that_is_gone_is_one_message(tmp_path: Path, name: str) -> None:
    (tmp_path / "gone").mkdir()
    shell = f"cd gone; rmdir ../gone; '{sys.executable}' -m featcal_cli {COMMANDS[name].replace('JOB', 'x')}"
    done = subprocess.run(["bash", "-c", shell], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the current folder is gone\n") and "fix: cd" in done.stderr


@pytest.mark.survive
@pytest.mark.parametrize(
    ("name", "environment"),
    [*(("modules as JSON", PLAIN), ("calibrate", PLAIN | NOWHERE)), *product(["recipes", "calibrate"], [NARROW])],
)
def test_an_encoding_without_letters(job: Path, tmp_path: Path, name: str, environment: dict[str, str]) -> None:
    done = run(COMMANDS[name], job, tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    if "JSON" in name:
        json.loads(done.stdout)


@pytest.mark.survive
def test_an_environment_that_only_looks_like_torchruns_is_one_message(job: Path, tmp_path: Path) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    done = run("recipes", job, tmp_path, **dict.fromkeys(names, "x"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: torchrun's variables in the environment are no numbers")


def test_threads_wait_for_each_other_only_briefly_unless_the_user_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    for said, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "5"}, "5"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in said.items():
            monkeypatch.setenv(name, value)
        share_cores()
        assert os.environ.get("GOMP_SPINCOUNT") == expected


# Packages that cannot be imported


def test_a_variable_that_no_package_can_read_is_quoted(tmp_path: Path) -> None:
    run = featcal("modules", "nowhere/model", folder=tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="abc")
    assert run.returncode == 2 and run.stderr.count("error:") == 1, run.stderr
    assert "huggingface_hub cannot be imported" in run.stderr and "'abc'" in run.stderr
    assert featcal("calibrate", "--help", folder=tmp_path, HF_HUB_DOWNLOAD_TIMEOUT="abc").returncode == 0


@pytest.mark.parametrize(
    ("package", "code", "told"),
    [
        ("torch", "raise OSError('libtorch_cpu.so: cannot open')", "torch cannot be imported: OSError: libtorch_cpu"),
        ("yaml", "raise ImportError('libyaml.so', name='yaml._yaml')", "yaml cannot be imported: ImportError: libyaml"),
        ("rich", "import nothing_of_this_name", "error: rich cannot be imported: ModuleNotFoundError: No module named"),
    ],
)
def test_a_package_that_cannot_be_imported_is_one_message(package: str, code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "modules" / package).mkdir(parents=True)
    (tmp_path / "modules" / package / "__init__.py").write_text(code)
    run = featcal("calibrate", "-r", "demo", "--dry-run", folder=tmp_path, PYTHONPATH=str(tmp_path / "modules"))
    assert run.returncode == 2 and run.stderr.count("error:") == 1 and run.stderr.count("fix:") == 1, run.stderr
    assert told in " ".join(run.stderr.split()), run.stderr


@pytest.mark.survive
def test_settings_of_matplotlib_cost_no_result(job: Path, tmp_path: Path) -> None:
    line = ("calibrate", "-r", job / "job.yaml", "-o", "out")
    (tmp_path / "broken").write_bytes(b"backend: \xff")
    run = featcal(*line, folder=tmp_path, MPLBACKEND="module://matplotlib_inline.nothing", MATPLOTLIBRC="broken")
    assert run.returncode == 0 and (tmp_path / "out" / "drift.png").is_file(), run.stderr
    # the current folder's is always read, and said to be wrong before anything is computed
    (tmp_path / "broken").rename(tmp_path / "matplotlibrc")
    run = featcal(*line, "--overwrite", folder=tmp_path)
    assert run.returncode == 2 and "matplotlib cannot be imported" in run.stderr, run.stderr
    assert "settings:" not in run.stderr


def test_what_is_written_to_a_closed_stream_goes_into_no_file(job: Path, tmp_path: Path) -> None:
    done = run("recipes demo", job, tmp_path, "2>&- >out.txt")
    assert done.returncode == 0 and (tmp_path / "out.txt").read_text().startswith("#")


# Processes


@pytest.mark.parametrize(
    ("found", "text", "fix"),
    [(0, "no GPU on", "leave it out"), (1, "1 GPU on", "leave it out"), (3, "3 GPUs", "--gpus 3")],
)
def test_more_processes_than_gpus_are_refused(found: int, text: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: found)
    with pytest.raises(RecipeError, match=text) as caught:
        distributed.start_ranks(4, ["calibrate", "merged", "--device", "cuda"])
    assert caught.value.where == "--gpus" and fix in caught.value.fix


def test_processes_of_torchrun_start_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "1")
    with pytest.raises(RecipeError, match="torchrun has started"):
        distributed.start_ranks(2, ["calibrate", "merged", "--device=cpu"])


# Before torch: something in its place ends the process there


STARTS = {
    "one argument": (["calibrate", "user/merged"], ": base user/base"),
    "an inspection": (["inspect-drift", "user/merged"], ": data red user/red-rows"),
    "an evaluation": (["evaluate", "-r", "demo"], "given: merged "),
}
"""What is typed, and what must be there when torch is asked for."""
ENDS = {"--help": "demo", "--version": "featcal ", "calibrate silent/model": "", "modules silent/model": ""}
"""What is typed that is answered, or refused, without torch."""
STANDS_IN = """
import sys
heavy = {"transformers", "datasets", "pyarrow", "matplotlib", "PIL", "pandas"} & sys.modules.keys()
raise ImportError(f"heavy modules before torch: {sorted(heavy)}")
"""


@pytest.fixture
def world(hub: HubServer, merge: Path, tmp_path: Path) -> None:
    """Let the Hub have a merge and all that it is made of, and a model of which nothing is said."""
    publish(hub, merge, "user")
    write_card(tmp_path, "A model")
    hub.add_repo("silent/model", tmp_path)


def start_with(torch: str, folder: Path, *line: str) -> subprocess.CompletedProcess[str]:
    """A command for which this code is torch."""
    (folder / "modules").mkdir()
    (folder / "modules" / "torch.py").write_text(torch)
    return featcal(*line, folder=None, PYTHONPATH=str(folder / "modules"))


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("start", STARTS)
def test_what_was_found_is_said_before_torch_or_anything_heavy_is_imported(start: str, tmp_path: Path) -> None:
    line, said = STARTS[start]
    run = start_with(STANDS_IN, tmp_path, *line)
    told = f"{run.stdout[-2000:]}\n{run.stderr}"
    assert run.returncode == 2 and "torch cannot be imported: ImportError: heavy modules before torch: []" in told, told
    assert said in told, told


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("line", ENDS)
def test_help_and_errors_in_lineage_do_not_import_torch(line: str, tmp_path: Path) -> None:
    run = start_with("import os\nos._exit(9)", tmp_path, *line.split())
    is_refused = "silent/model" in line
    assert run.returncode == (2 if is_refused else 0) and run.stderr.count("error:") == is_refused, run.stderr
    assert ("silent/model" in run.stderr) == is_refused and ENDS[line] in run.stdout
