"""Text of others made inert; an inspection as Markdown for a pipeline's summary, and the tables of a report."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from html import unescape
from pathlib import Path
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from featcal_cli.calibration.results import ADAPTER, AdapterReport, write_share
from featcal_cli.evaluation.results import CALIBRATED, EXPERT, MERGED, Score, average_tasks
from featcal_cli.lineage.questions import enumerate_names
from featcal_cli.reporting.report import PICTURE, DriftRow, Inspection, Report
from featcal_cli.reporting.verdict import list_columns, list_roles, write_verdict
from featcal_cli.runtime.errors import GateError
from featcal_cli.runtime.files import tell_bytes
from featcal_cli.runtime.untrusted_text import without_tokens

LONGEST_NAME = 200
LONGEST_DOCUMENT = 100_000
"""Characters that are kept; what is longer is cut, and says so."""


class _Parser(MarkdownIt):
    """Reads the structure that the document has when everything in it is inert."""

    def validateLink(self, url: str) -> bool:  # noqa: ARG002, N802
        return True  # the default would take bad links for text


_PARSER = _Parser("commonmark", {"html": False}).enable("table")
_PATH = re.compile(r"(?<![\w:/.~&;])~?/(?:[^\s/,;:()'\"`<>|\\]+/)*([^\s/,;:()'\"`<>|\\]+)/?")
_HOME_PATH = re.compile(
    r"(?<![\w:/.-])/(?:home|Users|root|tmp|var|mnt|media|srv|scratch|workspace|private|Volumes)/"
    r"(?:[^\s/,;:()'\"`<>|\\]+/)*([^\s/,;:()'\"`<>|\\]+)"
)
_COMMENT = re.compile(r"^ {0,3}<!--.*?-->[ \t]*\n?", re.DOTALL | re.MULTILINE)
_TARGET = r"[ \t\n]*(?P<to><(?!/?code>)[^<>\n]*>(?=[\s)]|$)|[^\s()<>]*)"
_PIECE = re.compile(
    r"(?P<escaped>\\[\s\S])"
    r"|(?P<ticks>`+)"
    r"|(?P<kept><code>(?:[^\W_]| |&#\d+;)*</code>|(?<=\S)<br ?/?>|<https?://[^\s<>]*>)"
    r"|(?P<angle><)"
    r"|\[!\[(?P<badge>[^\[\]`<\\]*)\]\([^()\s<>]*(?:\s+\"[^\"\n]*\")?\)(?=\]\()"
    r"|!+(?P<near>\[[^\[\]`<\\!]*\]\((?:\./)?[A-Za-z0-9_][\w/%-]*(?:\.[\w/%-]+)*\))"
    r"|(?P<blank>!+\[(?=\]))|(?P<image>!+\[)|(?P<bangs>!+)"  # the last, so that a long row of them is tried once
    rf"|(?P<link>\](?:\(|:)){_TARGET}"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_SAFE_SCHEMES = ("http", "https", "mailto")


def one_line(text: str, longest: int = LONGEST_NAME) -> str:
    """`text` in one line: without control, direction and other invisible characters, cut to `longest` characters."""
    replaced = {"Cc": " ", "Zl": " ", "Zp": " ", "Cf": "", "Cs": ""}
    shown = " ".join("".join(replaced.get(unicodedata.category(char), char) for char in text).split())
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def plain(text: str, longest: int = LONGEST_NAME) -> str:
    """`text` in one line, without secrets."""
    return one_line(without_tokens(text), longest)


def inert(text: str, longest: int = LONGEST_NAME) -> str:
    """`text` as one line of Markdown that shows exactly it, in a paragraph, a list item or a cell of a table."""
    shown = re.sub(r"([\\`*_\[\]!#~$@{}])", r"\\\1", plain(text, longest))
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "&#124;"), ("://", "&#58;//")):
        shown = shown.replace(char, entity)
    return re.sub(r"^([-+=]+|\d+[.)])(?=\s|$)", lambda marker: f"{marker[0][:-1]}&#{ord(marker[0][-1])};", shown)


def without_paths(text: str) -> str:
    """`text` with the last part alone of every absolute path."""
    return _PATH.sub(r"\1", text)


def clean(text: str) -> str:
    """Without what is not passed on: tokens, and the folders of this machine."""
    return without_paths(without_tokens(text))


def inert_document(markdown: str, level: int) -> str:
    """A whole Markdown document that can follow a heading of `level` - 1 in another one.

    Its headings start at `level`. Code stays as it is. Elsewhere HTML is shown instead of obeyed, images from other
    hosts are links, links lead to web pages only, comments are left out. Doing it twice changes nothing more.
    """
    text = markdown.replace("\r\n", "\n").replace("\r", "\n").replace("\0", "")
    if len(text) > LONGEST_DOCUMENT:
        text = f"{text[:LONGEST_DOCUMENT].rpartition(chr(10))[0]}\n\n(cut here: the rest is left out)"
    # comments are looked for only where there is an end for them, or looking takes minutes
    end = text.find("\n", last) + 1 or len(text) if (last := text.rfind("-->")) >= 0 else 0
    lines = _HOME_PATH.sub(r"\1", _COMMENT.sub("", text[:end]) + text[end:]).split("\n")
    tokens = _PARSER.parse("\n".join(lines))
    code, cells = _lines_of(tokens, "fence", "code_block"), _lines_of(tokens, "tr_open")
    dropped = _move_headings(lines, tokens, level)
    parts = []
    for first, end in _pieces(tokens, len(lines)):
        kept = [line for number, line in enumerate(lines[first:end], first) if number not in dropped]
        if first in code:
            parts += kept
        elif first in cells:
            parts += ["|".join(map(_inert_span, re.split(r"(?<!\\)\|", line))) for line in kept]
        else:
            parts.append(_inert_span("\n".join(kept)))
    return "\n".join(parts).strip("\n")


def _lines_of(tokens: list[Token], *kinds: str) -> set[int]:
    return {line for token in tokens if token.type in kinds and token.map for line in range(*token.map)}


def _move_headings(lines: list[str], tokens: list[Token], level: int) -> set[int]:
    """Write every heading of `lines` with #, so that the highest is of `level`; return the lines that are now empty."""
    headings = [(token, tokens[at + 1]) for at, token in enumerate(tokens) if token.type == "heading_open"]
    shift = max(0, level - min((int(token.tag[1]) for token, _ in headings), default=level))
    dropped: set[int] = set()
    for token, title in headings:
        assert token.map is not None
        first, end = token.map
        marks = "#" * min(6, int(token.tag[1]) + shift)
        if token.markup.startswith("#"):
            lines[first] = lines[first].replace(token.markup, marks, 1)
            continue
        content = title.content.split("\n")
        place = max(lines[first].find(content[0]), 0)  # after the marks of a list or a quotation
        lines[first] = f"{lines[first][:place]}{marks} {' '.join(part.strip() for part in content)}"
        dropped |= set(range(first + 1, end))
    return dropped


def _pieces(tokens: list[Token], count: int) -> Iterator[tuple[int, int]]:
    """The lines of every paragraph, heading, row and block of code, and of what is between them."""
    kinds = ("inline", "tr_open", "fence", "code_block")
    at = 0
    for first, end in sorted({(token.map[0], token.map[1]) for token in tokens if token.type in kinds and token.map}):
        if at < first:
            yield at, first
        if at < end:
            yield max(at, first), end
        at = max(at, end)
    if at < count:
        yield at, count


def _inert_span(text: str) -> str:
    """Text of one paragraph or cell, in which code spans, links and images may be."""
    shown, at = "", 0
    while piece := _PIECE.search(text, at):
        shown += text[at : piece.start()]
        at = piece.end()
        match piece.lastgroup:
            case "ticks" if closing := re.compile(rf"(?<!`){piece['ticks']}(?!`)").search(text, at):
                if "<" in (content := text[at : closing.start()]):
                    # shows the same to a reader who does not take it for code; \| is a bar in a table
                    plain = content.replace("\\|", "|").replace("\n", " ")
                    coded = "".join(char if char.isalnum() or char == " " else f"&#{ord(char)};" for char in plain)
                    shown += f"<code>{coded}</code>"
                else:
                    shown += f"{piece['ticks']}{content}{piece['ticks']}"
                at = closing.end()
            case "link" | "to":
                shown += text[piece.start() : piece.start("to")]
                if (target := _safe_target(piece["to"])) == piece["to"]:
                    at = piece.start("to")  # it may hold code or an image: the link need not be one
                else:
                    shown += target
            case "angle":
                shown += "&lt;"
            case "badge":
                shown += f"[{piece['badge'] or 'image'}"
            case "near":
                shown += f"!{piece['near']}"
            case "blank":
                shown += "[image"
            case "image":
                shown += "["
            case _:
                shown += "&lt;" if piece[0] == "\\<" else piece[0]
    return shown + text[at:]


def _safe_target(to: str) -> str:
    """The destination of a link, without the angles around it; that of this page for one that leads to none."""
    plain = "".join(char for char in unescape(re.sub(r"\\(.)", r"\1", to.strip("<>"))) if char.isprintable())
    scheme = _SCHEME.match(plain.replace(" ", ""))
    if scheme and scheme[1].lower() not in _SAFE_SCHEMES:
        return "./#"
    return quote(to[1:-1], safe="/:?#&=+,;@%") if to.startswith("<") else to


NAMED_TASKS = 3
"""More of them are named together, where a note is of all."""


def join_notes(notes: Iterable[str], tasks: Collection[str]) -> list[str]:
    """The notes in their order; those that say the same of several tasks are one."""
    said: dict[str, list[str]] = {}
    for note in notes:
        task = next((task for task in tasks if note.startswith(f"{task}: ")), None)
        if task is None:
            said.setdefault(note, [])
        else:
            said.setdefault(note[len(task) + 2 :], []).append(task)

    def name(named: Sequence[str]) -> str:
        distinct = list(dict.fromkeys(named))
        return f"all {len(tasks)} tasks" if len(distinct) == len(tasks) > NAMED_TASKS else enumerate_names(distinct)

    return [f"{name(named)}: {text}" if named else text for text, named in said.items()]


def label_roles(inspection: Inspection) -> dict[str, str]:
    """What every role is called where others read it: without tokens and the folders of this machine."""
    labels = {role: one_line(clean(inspection.names.get(role, role)), 120) for role in list_roles(inspection)}
    if "base" in labels:
        labels["base"] = "base model"
    if labels.get("other") == labels["model"]:
        labels |= {"model": f"A: {labels['model']}", "other": f"B: {labels['other']}"}
    return labels


LONGEST_TEXT = 400
COMMIT = re.compile(r"@([0-9a-f]{7})[0-9a-f]{33}\b")


def write_summary(inspection: Inspection, exceeded: GateError | None = None) -> str:
    """The whole text, with a heading of the second level; exceeded: what the gate of `--max-drift` says."""
    names = {role: _show(inspection.short_names.get(role, role)) for role in list_roles(inspection)}
    parts = [f"## Feature drift of {names.get('other', names['model'])}"]
    if exceeded is not None:
        parts.append(f"❌ **{_show(exceeded.what)}**  \n{_show(exceeded.where)}")
    parts += [f"⚠️ {text}" if is_warning else text for is_warning, text in write_verdict(inspection, names, inert)]
    columns = [column for column in list_columns(inspection) if column.kind != "difference"]
    measures = {column.measure for column in columns}
    lines = [write_row(["task", *(f"{column.measure}, {column.role}" for column in columns)])]
    lines.append(f"| --- |{' ---: |' * len(columns)}")
    for number, task in enumerate(inspection.tasks):
        lines.append(write_row([inert(task), *(column.write(column.values[number]) for column in columns)]))
    if len(inspection.tasks) > 1:
        lines.append(write_row(["**mean**", *(column.write(column.mean) for column in columns)]))
    about = ", ".join(f"{role}: {name}" for role, name in names.items())
    about += ". Drift is mean ‖h − h\\_expert‖ / mean ‖h\\_expert‖ after the last block; 0 is the expert itself."
    if "output" in measures:
        about += " Output is the same distance of answers, which the expert's own head makes of the model's features."
    if "agree" in measures:
        about += " Agree: share of the expert's first choices that its own head makes of the model's features too."
    return "\n\n".join([*parts, "\n".join(lines), about]) + "\n"


def write_row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _show(text: str) -> str:
    """As others may read it: of folders the last part, of commits the first digits."""
    return inert(COMMIT.sub(r"@\1", without_paths(text)), LONGEST_TEXT)


def write_accuracy(report: Report) -> Iterator[str]:
    """What expert, merged and calibrated model reach on labelled data, where it was measured."""
    if not report.accuracy:
        return
    ranked = [inert(task) for task, scores in report.accuracy.items() if scores.metric == "spearman"]
    ranks = f" (of {', '.join(ranked)}: 100 · Spearman's ρ)" if ranked else ""
    roles = (EXPERT, MERGED, CALIBRATED)
    rows = [["task", *roles], ["---", *["---:"] * len(roles)]]
    for task, scores in report.accuracy.items():
        rows.append([inert(task), *(write_percent(scores.scores[role]) for role in roles)])
    if len(report.accuracy) > 1:
        means = average_tasks(report.accuracy)
        rows.append(["**mean**", *(write_percent(means[role]) for role in roles)])
    about = f"In percent, on labelled data{ranks}; ± is half of the 95 % interval, by bootstrap over examples."
    yield f"## Accuracy\n\n{about}"
    yield "\n".join(map(write_row, rows))


def write_percent(score: Score) -> str:
    return f"{100 * score.value:.1f} ±{100 * (score.high - score.low) / 2:.1f}"


def write_distances(report: Report) -> Iterator[str]:
    """How far merged and calibrated are from the experts: what the result is judged by, then drift of features."""
    on_fitted, where = ", on fitted rows", "**the examples that were fitted**, because there were no others; "
    where += "on new ones it will be larger."
    if len(report.fitted_tasks) < len(report.drift):
        marked = " Where a task is marked \\*, there were none, and **it is measured on the fitted ones**."
        on_fitted, where = "", "examples that were not fitted." + (marked if report.fitted_tasks else "")
    answers = "\n".join(_write_answers(report))
    if report.answers:
        what = "This is mean ‖z − z_expert‖ / mean ‖z_expert‖, where z is what each expert's own head makes of the last"
        where_and_how = (
            f"{where} 0 is the expert. Of logits, each counts half by its probability and half like all others."
        )
        yield f"## Distance of answers from the experts'{on_fitted}\n\n{what} features, on {where_and_how}"
        yield from filter(None, (_write_drift_table(report.judged_rows), answers))
    drift = f"Drift is mean ‖h − h_expert‖ / mean ‖h_expert‖ after the last block, on {where} 0 is the expert."
    yield f"## Drift from the experts{on_fitted}\n\n{drift}"
    yield _write_drift_table(report.drift_rows)
    if report.curves:
        before, after, *_ = report.drift_rows[-1].cells
        what = "Line charts of the drift from each expert after every block, of base, merged and calibrated model"
        yield f"![{what}. The mean after the last block is {before} merged, and {after} calibrated.]({PICTURE})"
    if answers and not report.answers:
        yield answers
    rows = [(row, row.base) for row in report.judged_rows[: len(report.drift)] if row.base is not None]
    if farther := [inert(row.task) for row, base in rows if row.before > base]:
        what = f"On {', '.join(farther)} the merged model is farther from its expert than the base model is"
        yield f"{what}: there merging was worse than doing nothing, and a smaller merging scale usually helps."


def write_adapter(adapter: AdapterReport, merged: str, commit: str | None, output: str, model_class: str) -> str:
    """What the adapter of an output is, and the code that puts it on the merged model. commit: of its repo, None for a
    folder; output: a folder or a repo; model_class: a class of transformers that loads both."""
    model_class = model_class if model_class.isidentifier() else "AutoModel"
    name, place = (json.dumps(one_line(text), ensure_ascii=False) for text in (merged, output))
    if commit is None:
        name = json.dumps(one_line(Path(merged).name), ensure_ascii=False)
    revision = f', revision="{commit}"' if commit else ""
    left_out = f" It cannot hold {len(adapter.left_out)} of the changed parameters." if adapter.left_out else ""
    return f"""### As an adapter

The folder `{ADAPTER}` holds the same updates as a LoRA adapter of rank {adapter.rank} ({tell_bytes(adapter.bytes)}): it
keeps {write_share(adapter.share)} of their sum of squares.{left_out} It goes on the merged model:

```python
from peft import PeftModel
from transformers import {model_class}

merged = {model_class}.from_pretrained({name}{revision}, dtype="auto")
model = PeftModel.from_pretrained(merged, {place}, subfolder="{ADAPTER}")
```"""


def _write_drift_table(rows: Sequence[DriftRow]) -> str:
    heads = ["task", "merged", "calibrated", "change", "base model"][: 1 + len(rows[-1].cells)]
    lines = [write_row(heads), f"| --- |{' ---: |' * (len(heads) - 1)}"]
    for number, row in enumerate(rows):
        name = "**mean**" if 0 < number == len(rows) - 1 else inert(row.task) + (" \\*" if row.is_marked else "")
        lines.append(write_row([name, *write_drift_cells(row)]))
    return "\n".join(lines)


def write_drift_cells(row: DriftRow) -> list[str]:
    return [cell.replace("-", "−") for cell in row.cells]


def _write_answers(report: Report) -> Iterator[str]:
    """What drift does to the answers of the experts that give some, run with their own heads; nothing for the rest."""
    rows = []
    for task, measured in report.measures.items():
        before, after = (model.output if (model := measured.models.get(r)) else None for r in (MERGED, CALIBRATED))
        if before and after and before.agreement is not None and after.agreement is not None:
            agreed = f"{100 * before.agreement:.0f} % → {100 * after.agreement:.0f} %"
            rows.append(write_row([inert(task), agreed, f"{before.divergence:.3f} → {after.divergence:.3f}"]))
    if rows:
        about = "What each expert's own head makes of the model's last features, merged → calibrated:\n"
        heads = "| task | same first choice as the expert | KL from the expert, nats |\n| --- | ---: | ---: |"
        yield from (about, heads, *rows)
