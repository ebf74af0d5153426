"""What mkdocs asks for while it builds the site: README is its front, links to other files work.

The site has pages of its own for README.md and its like, and copies of the files of the repository
that pages link to; a link to a folder becomes its text. https://www.mkdocs.org/user-guide/plugins/
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
TOP_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)#\s]+)((?:#[^)\s]*)?)\)")


def site_path(target: str, folder: Path) -> str | None:
    """Where the site has what a link names; None for a folder. Links to elsewhere stay as they are."""
    if re.match(r"[a-z]+:", target):
        return target
    path = (folder / target).resolve()
    if path.is_dir() or not path.is_relative_to(ROOT):
        return None
    inside = path.relative_to(ROOT).as_posix()
    return TOP_PAGES.get(inside, inside.removeprefix("docs/"))


def with_site_links(markdown: str, folder: Path) -> str:
    """A page of the repository with its links as the site has them."""

    def link(found: re.Match) -> str:
        to = site_path(found[2], folder)
        return found[1] if to is None else f"[{found[1]}]({to}{found[3]})"

    return LINK.sub(link, markdown)


def linked_files(markdown: str, folder: Path) -> list[Path]:
    """The files outside of docs/ that a page links to."""
    paths = [
        (folder / found[2]).resolve()
        for found in LINK.finditer(markdown)
        if not re.match(r"[a-z]+:", found[2])
    ]
    return [
        p
        for p in paths
        if p.is_file()
        and p.is_relative_to(ROOT)
        and not p.is_relative_to(ROOT / "docs")
        and p.name not in TOP_PAGES
    ]


def on_files(files: Files, config, **kwargs) -> Files:
    """Add the pages from the top of the repository, and the files that are linked to."""
    for name, page in TOP_PAGES.items():
        text = with_site_links((ROOT / name).read_text(), ROOT)
        files.append(File.generated(config, page, content=text))
    sources = [*(ROOT / name for name in TOP_PAGES), *(ROOT / "docs").glob("**/*.md")]
    for path in sorted({p for s in sources for p in linked_files(s.read_text(), s.parent)}):
        inside = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, inside, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page, **kwargs) -> str:
    """Links of a page in docs/, as the site has them."""
    if page.file.src_uri in TOP_PAGES.values():
        return markdown
    return with_site_links(markdown, ROOT / "docs")
