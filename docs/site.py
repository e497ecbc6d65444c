"""What the documentation site takes from outside of docs/: the README as its first page, the figures, the changes.

Called by `mkdocs build`; mkdocs.yml names this file as a hook.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/NOTES.md": "notes.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files of the repository that become pages."""


def on_files(files: Any, config: Any) -> Any:
    """Add those pages to the ones in docs/."""
    for source, page in PAGES.items():
        text = _point_to_pages((ROOT / source).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Let links of docs/ that leave the folder lead to the pages too."""
    return _point_to_pages(markdown)


def _point_to_pages(markdown: str) -> str:
    """Links between files of the repository, as links between pages, which all lie in one folder."""

    def lead(link: re.Match[str]) -> str:
        path = link["path"].removeprefix("../")
        return f"]({PAGES.get(path, path.removeprefix('docs/'))}"

    return re.sub(r"\]\((?!https?:|#)(?P<path>[^)#\s]+)", lead, markdown)
