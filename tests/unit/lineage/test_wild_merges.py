"""Merges as they look on the Hub: each is found, or all that is missing is asked for at once."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hub_texts import Files, card, open_texts
from wild_merges import MERGES, Merge

from featcal_cli.lineage.resolve import find_lineage
from featcal_cli.lineage.search import OpenQuestionsError
from featcal_cli.recipe.reading import collect_overrides, read_draft
from featcal_cli.recipe.schema import Draft
from featcal_cli.runtime.errors import LineageError

ROWS: dict[str, Files] = {
    "data ORG/rows": card(),
    "data ORG/parts": card(configs=[{"config_name": "one"}, {"config_name": "two"}]),
    "ORG/mine": card(),
}
ANSWERS = {"REPO": "ORG/mine", "SOURCE": "ORG/rows", "CONFIG": "one", "TASK": "mine"}


def read_command(command: str) -> Draft:
    """What a command line of `featcal calibrate` says, as the command itself reads it."""
    featcal, calibrate, merged, *options = shlex.split(command)
    assert (featcal, calibrate) == ("featcal", "calibrate")
    given: dict[str, list[str]] = {"base": [], "expert": [], "data": [], "skip_expert": []}
    for name, value in zip(options[::2], options[1::2], strict=True):
        given[name.removeprefix("--").replace("-", "_")].append(value)
    base = next(iter(given.pop("base")), None)
    return read_draft(None, collect_overrides(merged=merged, base=base, **given))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize("merge", MERGES, ids=lambda merge: merge.name)
def test_a_merge_is_found_or_asked_for_in_one_round(merge: Merge) -> None:
    opener = open_texts({"ORG/merged": merge.files, **merge.repos, **ROWS})
    draft = Draft(merged="ORG/merged")
    if merge.refused:
        with pytest.raises(LineageError, match=merge.refused):
            find_lineage(draft, opener)
        return
    if merge.asks:
        with pytest.raises(OpenQuestionsError) as caught:
            find_lineage(draft, opener)
        command = caught.value.command
        for words in merge.words:
            assert words in str(caught.value)
        asked = [" ".join(pair) for question in caught.value.questions for pair in question.options or ()]
        assert sorted(asked) == sorted(merge.asks)
        names_experts = any(one.startswith("--expert") for one in asked)
        for task, expert in merge.experts.items():
            assert (f"--expert {task}={expert}" in command) is names_experts
        if merge.base:
            assert (f"--base {merge.base}" in command) is names_experts
        command = re.sub(r"\b(REPO|SOURCE|CONFIG|TASK)\b", lambda word: ANSWERS[word[1]], command)
        draft = read_command(command)
    lineage = find_lineage(draft, opener)
    values = {finding.role: finding.value for finding in lineage.findings}
    if not merge.asks:
        assert values["base"] == merge.base
        experts = {role: value for role, value in values.items() if role.startswith("expert ")}
        assert experts == {f"expert {task}": one for task, one in merge.experts.items()}
    sources = {finding.role: finding.source for finding in lineage.findings}
    for role, source in merge.sources.items():
        assert source in sources[role]
    assert merge.note in "\n".join(lineage.notes)


def test_forty_merges_are_looked_at() -> None:
    assert len({merge.name for merge in MERGES}) == len(MERGES) >= 40
