"""Energy is what the machine's counters say, and nothing where they say nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import BY_NAME, save_family

from featcal_cli.runtime import energy
from featcal_cli.runtime.energy import EnergyMeter, add_energy
from featcal_cli.runtime.progress import Listener
from featcal_cli.workflows.verbs import calibrate

WATT_HOUR = 3_600_000_000
"""In microjoules."""
RANGE = 5 * WATT_HOUR


@pytest.fixture
def powercap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Counters of two processors and their parts, as Linux lays them out."""
    folder = tmp_path / "powercap"
    names = ("package-0", "package-1", "core", "dram", "psys")
    for zone, name in zip(("0", "1", "0:0", "0:1", "2"), names, strict=True):
        place = folder / f"intel-rapl:{zone}"
        place.mkdir(parents=True)
        (place / "name").write_text(f"{name}\n")
        (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
        (place / "energy_uj").write_text("1000\n")
    monkeypatch.setattr(energy, "POWERCAP", folder)
    return folder


def spend(folder: Path, zone: str, watt_hours: float) -> None:
    file = folder / f"intel-rapl:{zone}" / "energy_uj"
    file.write_text(f"{(int(file.read_text()) + round(watt_hours * WATT_HOUR)) % RANGE}\n")


def test_processors_are_added_their_parts_are_not_and_counters_may_begin_again(powercap: Path) -> None:
    meter = EnergyMeter(processors=True)
    assert meter.read() == {"cpu_watt_hours": 0}
    for _ in range(4):
        spend(powercap, "0", 2)
        spend(powercap, "1", 0.5)
        spend(powercap, "0:0", 1)
        spend(powercap, "2", 3)
        meter.read()
    assert meter.read() == {"cpu_watt_hours": pytest.approx(10)}


def test_nothing_is_said_where_a_counter_cannot_be_read(powercap: Path) -> None:
    meter = EnergyMeter(processors=True)
    (powercap / "intel-rapl:1" / "energy_uj").unlink()
    assert meter.read() == {"cpu_watt_hours": None}
    (powercap / "intel-rapl:1" / "energy_uj").write_text("5000\n")
    assert meter.read() == {"cpu_watt_hours": None}, "what passed meanwhile is not known"
    assert add_energy([meter.read()]) == {}


def test_without_counters_there_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    assert add_energy([EnergyMeter(processors=True, gpu="no such").read()]) == {}
    assert EnergyMeter(processors=False).read() == {}


def test_processes_are_added_where_all_of_them_can_tell() -> None:
    first, second = {"cpu_watt_hours": 1.0, "gpu_watt_hours": 2.0}, {"gpu_watt_hours": 3.0}
    assert add_energy([first, second]) == {"cpu_watt_hours": 1.0, "gpu_watt_hours": 5.0}
    assert add_energy([first, {"gpu_watt_hours": None}]) == {"cpu_watt_hours": 1.0}


def test_report_and_card_say_what_a_run_used(powercap: Path, tmp_path: Path) -> None:
    spent = 0.0

    class Spender(Listener):
        def stage(self, _: str) -> None:
            nonlocal spent
            spend(powercap, "0", 1.5)
            spent += 1.5

    result = calibrate(save_family(tmp_path, BY_NAME["bert"]).recipe(), output=tmp_path / "out", listener=Spender())
    cost = json.loads((tmp_path / "out" / "featcal_report.json").read_text())["cost"]
    assert RANGE / WATT_HOUR < cost["cpu_watt_hours"] <= spent
    assert result.report.cost == cost and "gpu_watt_hours" not in cost
    assert f"{cost['cpu_watt_hours']:.3f} Wh of the processors' energy" in (tmp_path / "out" / "README.md").read_text()
