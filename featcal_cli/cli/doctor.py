"""`featcal doctor`: the command, and what the terminal shows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from featcal_cli.cli import options
from featcal_cli.runtime.structured_text import write_json

if TYPE_CHECKING:
    from featcal_cli.workflows.doctor import Finding

MARKS = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "problem": "[red]✗[/]"}


def doctor(json: options.Json = False) -> None:
    """Check this machine: versions, device, memory, caches, the Hub and your token, with a fix for whatever is wrong.

    Exit code 1 means that something would stop a run. No secret is printed: add the output to a bug report.

    **Examples**

        featcal doctor

        featcal doctor --json
    """
    from featcal_cli.workflows.doctor import examine

    findings = list(examine())
    is_well = all(finding.state != "problem" for finding in findings)
    if json:
        typer.echo(write_json({"ok": is_well, "findings": [asdict(item) for item in findings]}, indent=2))
    else:
        show_findings(findings)
    if not is_well:
        raise typer.Exit(1)


def show_findings(findings: Sequence[Finding]) -> None:
    """A line for each, wrapped at words; below it the fix, and the command on a line of its own."""
    from featcal_cli.cli.console import OUT, escape, fold

    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        lines = fold(finding.text, OUT.width - width - 4, rest="")
        OUT.print(f"{MARKS[finding.state]} {finding.name:<{width}}  {escape(lines[0])}", soft_wrap=True)
        indent = " " * (width + 4)
        for line in lines[1:]:
            OUT.print(escape(f"{indent}{line}"), soft_wrap=True)
        if finding.fix:
            for line in fold(f"fix: {finding.fix}", OUT.width - width - 4, rest="     "):
                OUT.print(f"{indent}[bold]{escape(line)}[/]", soft_wrap=True)
        if finding.command:
            OUT.print(f"{indent}     {escape(finding.command)}", soft_wrap=True)
    problems = sum(finding.state == "problem" for finding in findings)
    verdict = {0: "All is well.", 1: "One thing would stop a run."}.get(
        problems, f"{problems} things would stop a run."
    )
    OUT.print(f"\n{verdict}")
