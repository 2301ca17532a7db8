"""The documentation site: it builds without a broken link, has every page, and is read without a network."""

import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("material", reason="mkdocs-material is not installed: make docs")

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(nav: Any) -> Iterator[str]:
    """The Markdown files of a `nav`, from its nested lists and mappings."""
    if isinstance(nav, str):
        yield nav
    else:
        for entry in nav.values() if isinstance(nav, dict) else nav:
            yield from pages(entry)


def named() -> list[str]:
    """The HTML files that the `nav` stands for."""
    nav = yaml.safe_load((REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    return [page.removesuffix(".md") + ".html" for page in pages(nav)]


def test_every_page_is_there(site: Path) -> None:
    assert len(named()) > 15
    for page in named():
        assert "<h1" in (site / page).read_text(encoding="utf-8"), page


class Loads(HTMLParser):
    """Addresses that a browser loads by itself, and classes whose content a script would load something for."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.classes: set[str] = set()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.classes |= set((given.get("class") or "").split())
        for name in (
            "src",
            "srcset",
            "poster",
            "data",
            *(["href"] if tag in ("link", "use", "image") else []),
        ):
            if (address := given.get(name)) is not None:
                self.addresses.append(address)


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    found = list(site.rglob("*.html"))
    assert len(found) >= len(named())
    for page in found:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        assert loads.addresses, page
        assert not [address for address in loads.addresses if "//" in address], page
        assert "mermaid" not in loads.classes, page  # the theme fetches what draws it
    for sheet in site.rglob("*.css"):
        text = sheet.read_text(encoding="utf-8").replace(" ", "")
        assert "@import" not in text, sheet
        assert "url(http" not in text.replace("'", "").replace('"', ""), sheet


def test_the_search_index_has_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert {entry["location"].partition("#")[0] for entry in index["docs"]} >= set(named())


def test_it_is_searched_as_a_file(site: Path, browser: Any) -> None:
    page, asked = browser.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto((site / "index.html").as_uri())
    page.locator(".md-search__input").press_sequentially("explained variance", delay=100)
    page.wait_for_selector(".md-search-result__link[href*='metrics.html']", state="attached")
    assert all(address.startswith(("file:", "data:")) for address in asked), asked
    page.close()
