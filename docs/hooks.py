"""Hooks of the site: what lies outside docs/ and belongs to it.

The README and config/README.md become pages, and any other file of the repository that a page links to is copied
along. So one link does both on the site and where the repository is read file by file.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

PAGES = {"README.md": "overview.md", "config/README.md": "settings.md"}
COPIES = "repository"
FENCE_OR_LINK = re.compile(r"^```.*?^```|\]\((?!\w+:|#)([^)#\s]+)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(_repository(config) / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page with its links to files of the repository turned into links within the site."""
    sources = {page: source for source, page in PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def link(match: re.Match[str]) -> str:
        if match[1] is None:
            return match[0]
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        if target in PAGES:
            return f"]({PAGES[target]}"
        if target.startswith("docs/"):
            return f"]({target.removeprefix('docs/')}"
        path, copy = _repository(config) / target, f"{COPIES}/{target}"
        if path.is_file() and files.get_file_from_path(copy) is None:
            files.append(File.generated(config, copy, abs_src_path=str(path)))
        return f"]({copy}"

    return FENCE_OR_LINK.sub(link, markdown)


def _repository(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).parent
