"""Let pages of the documentation site link to files outside of docs/, as they do on GitHub.

In the site, the files of docs/ are at the top. Every other file of the project that a page links to keeps its path:

    docs/rules.md                links ../recipes/figures/rules.png
    site/rules/index.html        links ../recipes/figures/rules.png, a copy that the build makes

Linked Markdown pages (lab notes, CONTRIBUTING.md) become pages of the site, and their links are followed too. The
README has the path readme/, because the front page of the site is docs/index.md.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def targets(page: str) -> list[str]:
    """Return the files of the project that a page links to.

    Args:
        page (`str`):
            Path of a Markdown page in the project.

    Returns:
        `list[str]`: paths in the project. Web addresses are left out.
    """
    found = [target for _, target, _ in LINK.findall((ROOT / page).read_text())]
    return [in_project(page, target) for target in found if "://" not in target and "{{" not in target]


def in_project(page: str, target: str) -> str:
    """Return the path in the project that a link of a page leads to."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    if (ROOT / path / "README.md").exists() and path != ".":
        path = f"{path}/README.md"
    return path


def in_site(path: str) -> str:
    """Return the path that a file of the project has in the site."""
    return "readme.md" if path == "README.md" else path.removeprefix("docs/")


def on_files(files: Files, config) -> Files:
    """Add every file outside of docs/ that a page links to, directly or through another page."""
    waiting = [f"docs/{one.src_uri}" for one in files.documentation_pages()]
    seen = set(waiting)
    while waiting:
        page = waiting.pop()
        for path in targets(page):
            if path in seen or path.startswith("docs/") or not (ROOT / path).is_file():
                continue
            seen.add(path)
            files.append(File.generated(config, in_site(path), abs_src_path=os.fspath(ROOT / path)))
            if path.endswith(".md"):
                waiting.append(path)
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Change the links of a page to paths of the site. A link to a folder becomes plain text."""
    source = Path(page.file.abs_src_path).relative_to(ROOT).as_posix()
    folder = posixpath.dirname(page.file.src_uri) or "."

    def rewrite(match: re.Match) -> str:
        text, target, anchor = match.groups()
        if "://" in target:
            return match.group()
        path = in_project(source, target)
        if (ROOT / path).is_dir():
            return text
        return f"[{text}]({posixpath.relpath(in_site(path), folder)}{anchor or ''})"

    return LINK.sub(rewrite, markdown)
