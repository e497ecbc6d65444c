"""Every bad input is one message (what, where, how to mend it), exit code 2, and nothing written anywhere."""

from pathlib import Path

import bad_data
import bad_models
import bad_options
import pytest
from bad_input import Arrange, Stage, files_under, good_arguments
from command_line import Capsys, featcal_inside

CASES = [
    pytest.param(arrange, words, id=f"{kind.__name__}-{number}")
    for kind in (bad_options, bad_models, bad_data)
    for number, (arrange, words) in enumerate(kind.CASES)
]


@pytest.mark.parametrize(("arrange", "words"), CASES)
def test_bad_input_is_one_clear_message(
    stage: Stage, tmp_path: Path, capsys: Capsys, arrange: Arrange, words: list[str]
) -> None:
    chosen = {"command": "calibrate", **good_arguments(stage.folder), **(arrange(stage) or {})}
    before = files_under(tmp_path)
    run = featcal_inside(capsys, str(chosen.pop("command")), chosen)
    assert run.code == 2, run.stderr
    assert run.stdout == ""
    assert run.stderr.count("error:") == 1 and "Traceback" not in run.stderr
    assert "fix:" in run.stderr
    message = run.shown[run.shown.index("error:") :].splitlines()
    # but for commands, which are never cut
    assert sum(-(-len(line) // 80) for line in message if not line.startswith("    featcal ")) <= 6, run.shown
    assert "\x1b" not in run.stderr
    for word in words:
        assert word in run.stderr, run.stderr
    assert files_under(tmp_path) == before
