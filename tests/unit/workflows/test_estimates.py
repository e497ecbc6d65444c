"""How many examples make a batch; the time that a run is expected to take, and the time left of it, over all its
stages."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers as tf
from command_line import Capsys
from families import BY_NAME, Saved, save_family
from jobs import CPU
from recipe_world import TINY
from safetensors.torch import load_file, save_file

from featcal_cli import dry_run
from featcal_cli.calibration.distillation import Schedule
from featcal_cli.cli.console import OUT, Screen
from featcal_cli.cli.results import show_plan
from featcal_cli.data.batches import Batch, count_examples
from featcal_cli.models.inventory import list_registered, run_without_values
from featcal_cli.runtime.hardware import find_core_limits, find_memory_limits, memory_of, use_granted_cores, usual_modes
from featcal_cli.runtime.progress import Countdown, Listener, Progress, tell_range
from featcal_cli.workflows import plan as module
from featcal_cli.workflows.durations import SPREAD, WRITING, TimeEstimate
from featcal_cli.workflows.inputs import find_inputs
from featcal_cli.workflows.plan import Plan, make_plan
from featcal_cli.workflows.session import RunOptions, Session
from featcal_cli.workflows.verbs import calibrate
from featcal_cli.workflows.workload import CPU_ROWS, DEVICE_ROWS, PLAIN, choose_batch_sizes, limit_batch, probe_batch

CUDA = torch.device("cuda")
GIB = 2**30


def sizes_of(
    model: tf.PreTrainedModel, longest: dict[str, Batch], device: torch.device, memory: int = 24 * GIB
) -> dict[str, int]:
    architecture = run_without_values(model, "auto", longest) or list_registered(model, longest, "auto")
    return choose_batch_sizes(model, architecture, longest, device, memory)


def plan(recipe: dict[str, object], batch_size: int | None = None) -> Plan:
    session = Session(recipe, RunOptions("cpu", batch_size))
    return make_plan(session, find_inputs(session))


def counts(batches: list[Batch]) -> list[int]:
    return [count_examples(batch) for batch in batches]


def test_a_little_more_or_less_memory_changes_nothing() -> None:
    """As after an update of a driver or a kernel."""
    for total in (15.4, 23.5, 79.1):
        few = {limit_batch(512, 60_000_000, CUDA, int((total + change) * GIB)) for change in (-0.3, 0, 0.3)}
        assert len(few) == 1


WIDE = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
READ = 4 * 512 * (3 * 4096 + 14_336)
"""Bytes that q_proj, o_proj, gate_proj and down_proj of a block so wide read of a text."""
MODELS: dict[str, Callable[[], tf.PreTrainedModel]] = {
    "clip": lambda: tf.CLIPVisionModel(tf.CLIPVisionConfig(num_hidden_layers=2)),
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**WIDE, num_hidden_layers=2)).bfloat16(),
    "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(encoder_layers=1)).bfloat16(),
    "albert": lambda: tf.AlbertModel(tf.AlbertConfig(num_hidden_layers=4)),
}


@pytest.mark.parametrize(
    ("name", "shapes", "device", "memory", "least", "most"),
    [
        ("clip", {"pixel_values": (3, 224, 224)}, CUDA, 79, 256, 10**9),
        ("clip", {"pixel_values": (3, 224, 224)}, CPU, 24, 20, CPU_ROWS // 50),
        ("llama", {"input_ids": (512,)}, CUDA, 23, 8, min(DEVICE_ROWS // 512, GIB // READ)),
        ("llama", {"input_ids": (512,)}, CPU, 24, CPU_ROWS // 512, CPU_ROWS // 512),
        ("whisper", {"input_features": (80, 3000), "decoder_input_ids": (1,)}, CPU, 24, 1, 1),
        ("albert", {"input_ids": (64,)}, CPU, 512, CPU_ROWS // 64, CPU_ROWS // 64),
    ],
    ids=["images", "images", "long texts", "long texts", "a decoder of one token", "a block that runs often"],
)
def test_a_batch_is_as_large_as_its_longest_examples_and_memory_allow(
    name: str, shapes: dict[str, tuple[int, ...]], device: torch.device, memory: int, least: int, most: int
) -> None:
    """All images of a task are one batch on a large card; a short decoder does not hide a long encoder, and a block
    that runs often is counted once."""
    with torch.device("meta"):
        model = MODELS[name]().eval()
    inputs = {key: torch.zeros(1, *shape, dtype=torch.long if "ids" in key else None) for key, shape in shapes.items()}
    assert least <= sizes_of(model, {"task": inputs}, device, memory * GIB)["task"] <= most


@pytest.mark.parametrize("name", ["switch-transformers", "xmod"])
def test_a_model_that_looks_at_values_has_a_plain_size(name: str) -> None:
    with torch.device("meta"):
        model = BY_NAME[name].build()
    assert sizes_of(model, {"task": BY_NAME[name].inputs(1)}, CUDA) == {"task": PLAIN}


def test_the_mask_of_a_recording_is_one_of_its_rows_and_not_of_its_samples() -> None:
    with torch.device("meta"):
        model = tf.Wav2Vec2Model(tf.Wav2Vec2Config(**TINY, num_conv_pos_embedding_groups=2)).eval()
    batch = {"input_values": torch.zeros(2, 16_000), "attention_mask": torch.tensor([[1], [1]]).repeat(1, 16_000)}
    architecture = run_without_values(model, "auto", {"task": batch})
    assert architecture is not None
    whole = probe_batch(model, architecture, "", batch)
    batch["attention_mask"][0, 8_000:] = 0
    padded = probe_batch(model, architecture, "", batch)
    assert padded.state_bytes - whole.state_bytes == pytest.approx(padded.rows**2) and padded.rows == 49


def test_a_size_that_is_asked_for_is_the_size(tmp_path: Path) -> None:
    examples = plan(save_family(tmp_path, BY_NAME["bert"]).only(1).recipe(), batch_size=5).examples
    assert all(counts(found.fitted) == [5, 5, 2] for found in examples.values())
    assert all(counts(found.selection) == counts(found.held_out) == [4] for found in examples.values())


def test_every_task_has_batches_of_its_own_size(tmp_path: Path) -> None:
    """Cut by the longest text of the task."""
    saved = save_family(tmp_path, BY_NAME["llama"], examples=300)
    longer = {name: torch.nn.functional.pad(value, (0, 27), value=1) for name, value in saved.inputs["red"].items()}
    save_file(longer, tmp_path / "red.safetensors")
    found = plan(saved.recipe(examples=236)).examples
    assert counts(found["red"].fitted) == [CPU_ROWS // 36] * 4 + [12]
    assert counts(found["green"].fitted) == counts(found["blue"].fitted) == [CPU_ROWS // 9, 9]
    assert {task: examples.batch_size for task, examples in found.items()} == {"red": 56, "green": 227, "blue": 227}


def test_the_estimate_counts_no_more_examples_than_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # what else this process holds changes from one plan to the next
    monkeypatch.setattr("featcal_cli.workflows.estimates.resident_bytes", lambda: 0)
    recipe = save_family(tmp_path, BY_NAME["bert"]).only(1).recipe()
    needs = [plan(recipe, size).estimate.host_bytes for size in (1, 12, 10_000)]
    assert needs[0] < needs[1] and needs[1] == pytest.approx(needs[2], rel=0.05)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate is of the job alone, without what every process takes."""
    monkeypatch.setattr("featcal_cli.workflows.estimates.resident_bytes", lambda: 0)
    monkeypatch.setattr("featcal_cli.workflows.estimates.LARGEST_REUSED", 0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("done", ["merged", "evaluated"])
def test_memory_holds_what_is_read_of_whole_models(tmp_path: Path, done: str) -> None:
    """The largest parameter of all models at once while they are merged, and three models while they are evaluated."""
    kept = {"num_hidden_layers": 12} if done == "evaluated" else {"vocab_size": 20_000}
    saved = save_family(tmp_path, replace(BY_NAME["bert"], config={**BY_NAME["bert"].config, **kept}))
    saved.only(1 if done == "evaluated" else 3)
    size = (tmp_path / "merged" / "model.safetensors").stat().st_size
    recipe = saved.recipe()
    plain = dry_run(recipe, output=tmp_path / "out").estimate.host_bytes
    if done == "merged":
        found, least = dry_run({**recipe, "merged": {"method": "average"}}, output=tmp_path / "out"), 4 * size
    else:
        recipe["tasks"]["red"]["evaluate"] = {"split": "train"}  # type: ignore[index]
        found, least = dry_run(recipe, output=tmp_path / "out", evaluate=True), 3 * size
    assert plain < 0.9 * least < found.estimate.host_bytes


@pytest.mark.usefixtures("alone")
def test_one_length_does_not_stand_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in memory nor in time, neither that of the first texts nor of the longest."""
    monkeypatch.setattr(module, "measure_speed", lambda _: 1e3)
    monkeypatch.setattr("featcal_cli.workflows.durations.CALL", 0.0)
    saved = save_family(tmp_path, BY_NAME["bert"]).only(1)
    found = []
    for lengths in (torch.arange(2, 42) // 2, torch.arange(41, 1, -1) // 2, [20] + 39 * [2], 40 * [20]):
        mask = (torch.arange(20) < torch.as_tensor(lengths)[:, None]).long()
        save_file({"input_ids": mask * 5, "attention_mask": mask}, tmp_path / "red.safetensors")
        estimated = dry_run(saved.recipe(examples=30, method="featcal"), output=tmp_path / "out", batch_size=4)
        found.append((estimated.estimate.host_bytes, stages_of(estimated)["measuring the experts' outputs"]))
    short_first, long_first, one_long, all_long = found
    assert short_first == pytest.approx(long_first, rel=0.25)
    assert one_long[0] < all_long[0] / 2 and one_long[1] < all_long[1] / 3


@pytest.mark.usefixtures("alone")
def test_large_images_take_half_of_the_disk_in_bfloat16(tmp_path: Path) -> None:
    """Passes have them in files: what was read, which makes room for all else in memory, or copies, which do not."""
    config = {**BY_NAME["vit"].config, "image_size": 224, "patch_size": 28}
    saved = save_family(tmp_path, replace(BY_NAME["vit"], config=config)).only(1)
    images = torch.zeros(40, 3, 224, 224)
    save_file({"pixel_values": images}, tmp_path / "red.safetensors")
    read, converted = (
        dry_run(saved.recipe(examples=30, dtype=dtype), output=tmp_path / "out", batch_size=8).estimate
        for dtype in ("float32", "bfloat16")
    )
    assert converted.host_bytes > 10 * read.host_bytes
    assert read.disk_bytes - converted.disk_bytes == pytest.approx(images.nbytes / 2, rel=0.3)


def test_a_converted_part_that_no_example_reaches_is_on_the_disk_too(tmp_path: Path) -> None:
    saved = save_family(tmp_path, BY_NAME["llava"], dtype=torch.bfloat16).only(1)
    save_file({"input_ids": torch.ones(20, 9, dtype=torch.long)}, tmp_path / "red.safetensors")
    tower = sum(x.nbytes for name, x in load_file(tmp_path / "red" / "model.safetensors").items() if "vision" in name)
    converted, stored = (
        dry_run(saved.recipe(dtype=dtype), output=tmp_path / "out").estimate.disk_bytes
        for dtype in ("float32", "bfloat16")
    )
    assert converted - stored > 3 * 2 * tower


@pytest.mark.usefixtures("alone")
def test_a_mixture_is_read_beside_its_fused_experts_as_far_as_there_is_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {**BY_NAME["mixtral"].config, "num_hidden_layers": 8, "intermediate_size": 512}
    saved = save_family(tmp_path, replace(BY_NAME["mixtral"], config=config)).only(1)
    size = (tmp_path / "merged" / "model.safetensors").stat().st_size
    recipe = saved.recipe(examples=4)
    assert dry_run(recipe, output=tmp_path / "out").estimate.host_bytes == pytest.approx(2 * size, rel=0.3)
    monkeypatch.setattr("featcal_cli.workflows.estimates.memory_of", lambda _: 1.4 * size)
    assert dry_run(recipe, output=tmp_path / "out").estimate.host_bytes == pytest.approx(1.4 * size, rel=0.01)


GROUPS = "9:name=systemd:/\n0::/user/mine\n"


def write_limits(folder: Path, limits: Mapping[str, str]) -> None:
    for name, limit in limits.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{limit}\n", encoding="ascii")


def test_memory_is_what_the_control_groups_leave_of_it(tmp_path: Path) -> None:
    write_limits(tmp_path, {"user/mine/memory.max": "max", "memory.max": "6000000000"})
    assert sorted(find_memory_limits(GROUPS, tmp_path)) == [6_000_000_000]
    assert list(find_memory_limits(GROUPS, tmp_path / "elsewhere")) == []
    assert GIB // 2 < memory_of(CPU) < 2**50


def test_threads_are_as_many_as_control_groups_grant_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_limits(tmp_path, {"user/mine/cpu.max": "250000 100000", "user/cpu.max": "max 100000"})
    assert sorted(find_core_limits(GROUPS, tmp_path)) == [2.5]
    assert list(find_core_limits(GROUPS, tmp_path / "elsewhere")) == []
    threads: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("torch.get_num_threads", lambda: 64)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    for found in ([0.5, 8.0], [64.0], []):
        monkeypatch.setattr("featcal_cli.runtime.hardware.find_core_limits", lambda *_, found=found: iter(found))
        use_granted_cores()
    assert threads == [1]
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    monkeypatch.setattr("featcal_cli.runtime.hardware.find_core_limits", lambda *_: iter([2.0]))
    use_granted_cores()
    assert threads == [1]
    with usual_modes():
        threads.clear()
    assert threads == [64]


OPEN = dict.fromkeys(("ridge", "rho", "alpha"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return save_family(tmp_path_factory.mktemp("llama"), BY_NAME["llama"], examples=20)


def planned(saved: Saved, monkeypatch: pytest.MonkeyPatch, speed: float, **settings: object) -> Plan:
    monkeypatch.setattr(module, "measure_speed", lambda _: speed)
    recipe = saved.recipe(**settings)
    recipe["tasks"] = {"red": recipe["tasks"]["red"]}  # type: ignore[index]
    return dry_run(recipe, output=saved.folder / "out", batch_size=4)


def stages_of(plan: Plan) -> dict[str, float]:
    assert plan.time is not None
    return dict(plan.time.stages)


def test_what_is_done_takes_time_and_twice_the_examples_twice_as_much(
    llama: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How near to the clock it is, benchmarks/estimate.py measures."""
    monkeypatch.setattr("featcal_cli.workflows.durations.CALL", 0.0)
    few, many = (stages_of(planned(llama, monkeypatch, 1e3, **OPEN, examples=n)) for n in (6, 12))
    assert list(few) == list(many) and {name for name, seconds in few.items() if not seconds} == {"checking the result"}
    assert many["measuring the experts' outputs"] == pytest.approx(2 * few["measuring the experts' outputs"], rel=0.2)
    assert few["calibrating"] < many["calibrating"] < 2 * few["calibrating"], "solving takes as long for any number"
    assert few["writing"] == many["writing"] == WRITING


def test_what_is_not_done_takes_no_time(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = (stages_of(planned(llama, monkeypatch, speed)) for speed in (1e6, 1e3))
    assert fast["measuring the experts' outputs"] == fast["head"] == fast["refining the result"] == 0, "the paper's"
    assert slow["calibrating"] == pytest.approx(1e3 * fast["calibrating"])


def test_stages_are_reported_by_the_names_that_are_expected(llama: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_speed", lambda _: 1e9)
    seen: list[str] = []
    expected: list[str] = []

    class Watcher(Listener):
        def stage(self, text: str) -> None:
            seen.append(text)

        def expect(self, stages: Mapping[str, float], *, is_known: bool) -> None:
            assert is_known
            expected.extend(stages)

        def progress(self, progress: Progress) -> None:
            seen.append(progress.unit)

    monkeypatch.setattr("featcal_cli.workflows.plan.LONG", Schedule(4, 8, 0.1, 2))
    recipe = llama.recipe(**OPEN, refine=True)
    recipe["tasks"] = {"red": recipe["tasks"]["red"]}  # type: ignore[index]
    calibrate(recipe, output=llama.folder / "refined", listener=Watcher())
    assert [name for name in dict.fromkeys(seen) if name in expected] == expected


@pytest.mark.parametrize("known", [True, False])
def test_a_dry_run_tells_it(llama: Saved, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    plan = planned(llama, monkeypatch, 1e6)
    monkeypatch.setattr(OUT, "width", 80)
    object.__setattr__(plan, "time", TimeEstimate(20.0, {"calibrating": 130.0}, known))
    show_plan(plan)
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    unknown = "not known for this kind of job; the run tells what is left"
    assert f"time        {'about 2 to 4 minutes on this machine' if known else unknown}" in lines
    range_ = plan.to_dict()["estimate"]["seconds"]
    assert range_ == ((150 / SPREAD, 150 * SPREAD) if known else None)


def test_mixtures_are_not_estimated(tmp_path: Path) -> None:
    plan = dry_run(save_family(tmp_path, BY_NAME["mixtral"], examples=20).only(1).recipe(), output=tmp_path / "out")
    assert plan.time is not None and plan.time.range is None and not plan.time.is_known


EXPECTED = {"first": 30.0, "second": 60.0, "head": 10.0}


def test_what_is_expected_is_told_at_once_only_where_it_is_known() -> None:
    known, unknown = (Countdown(EXPECTED, is_known=is_known) for is_known in (True, False))
    for finished, now, told in ((0, 7.0, None), (4, 15.0, None), (5, 17.0, 190.0), (15, 37.0, 170.0)):
        for countdown in (known, unknown):
            countdown.reach("first", finished, 30, now)
        assert unknown.left(now) == told
        assert known.left(now) == (told or 100.0 - finished)


def test_a_step_that_takes_longer_leaves_the_time_of_those_after_it() -> None:
    countdown = Countdown(EXPECTED, is_known=True)
    assert countdown.left(0.0) is None and "second" in countdown and "writing" not in countdown
    countdown.reach("writing", 0, 1, 0.0)
    countdown.reach("second", 0, 12, 0.0)
    countdown.reach("second", 6, 12, 60.0)
    assert countdown.left(60.0) == pytest.approx(80.0)
    assert countdown.left(1000.0) == pytest.approx(70.0)
    countdown.reach("first", 1, 3, 70.0)  # was passed long ago
    assert countdown.left(60.0) == pytest.approx(80.0)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (8.2, 18.4, "8 to 20 seconds"),
        (44, 98, "45 to 100 seconds"),
        (100, 225, "2 to 4 minutes"),
        (2000, 4500, "35 to 75 minutes"),
        (5400, 12_000, "1.5 to 3.5 hours"),
        (150_000, 330_000, "40 to 90 hours"),
    ],
)
def test_a_range_has_no_more_digits_than_it_means(low: float, high: float, text: str) -> None:
    assert tell_range(low, high) == text


def test_the_bar_tells_the_time_left_of_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("featcal_cli.cli.console.time.monotonic", lambda: now)
    monkeypatch.setattr("featcal_cli.cli.console.STARTED", 940.0)
    screen = Screen(quiet=True)
    (task,) = screen._bar.tasks
    screen.stage("loading models")
    assert screen.tell_time(task) == "1:00"
    screen.expect({"calibrating": 200.0, "head": 100.0, "writing": 1.0}, is_known=True)
    screen.stage("calibrating")
    assert screen.tell_time(task) == "1:00 · 5:01 left"
    now = 1150.0  # half as fast as expected
    screen.progress(Progress("layers.3", 3, 8))
    assert screen.tell_time(task) == "3:30 · 7:32 left"
    screen.progress(Progress("layers.3", 3, 8, task="red"))
    now = 1400.0
    screen.progress(Progress("", 0, 1, unit="head"))
    assert task.description == "calibrating · head 1/1" and screen.tell_time(task) == "7:40 · 3:22 left"
    screen.stage("pushing to me/calibrated")
    assert screen.tell_time(task) == "7:40"
