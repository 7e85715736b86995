"""The reports: Markdown for an issue, one HTML page that a browser shows without anything else."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from .conftest import edit_tree, run

pytestmark = pytest.mark.xdist_group("drift")
MODEL = "models/deepseek_v4/nvidia/model.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """(Markdown, HTML, HTML file) of a run with a drifted tree, a good one, a native one, none."""
    tmp_path = tmp_path_factory.mktemp("reports")
    edits = {MODEL: lambda s: s.replace("class DeepseekV4MoE", "class <Renamed>")}
    tree = edit_tree(tmp_path / "next", "0.29.0", edits)
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    absent = str(tmp_path / "<absent>")
    run(str(tree), "0.29.0", "0.30.0", absent, "--report", str(page), "--report", str(text))
    return text.read_text(), page.read_text(), page


class Checker(HTMLParser):
    """Collects what a self-contained, well-formed page must not or must have."""

    VOID = {"meta", "br", "hr", "link", "img"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        self.ids += [values["id"]] if values.get("id") else []
        self.links += [values[k] for k in ("href", "src") if values.get(k)]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"


def test_page_is_well_formed_and_alone(reports: tuple[str, str, Path]) -> None:
    page = Checker()
    page.feed(reports[1])
    assert page.open == []
    assert not page.tags & {"script", "link", "img", "iframe"}
    assert len(page.ids) == len(set(page.ids)) == 4
    assert set(page.links) == {f"#{id_}" for id_ in page.ids}
    assert "<Renamed>" not in reports[1] and "&lt;absent&gt;" in reports[1]


def test_cells_differ_in_text_too(reports: tuple[str, str, Path]) -> None:
    cells = set(re.findall(r'<td class="([\w-]+)"[^>]*>([^<]+)</td>', reports[1]))
    by_class: dict[str, set[str]] = {}
    for name, text in cells:
        by_class.setdefault(name, set()).add(text)
    assert {"applies", "n-a", "native", "drifted", "error"} == set(by_class)
    texts = [text for found in by_class.values() for text in found]
    assert len(texts) == len(set(texts))


def test_markdown_names_the_cause(reports: tuple[str, str, Path]) -> None:
    text = reports[0]
    assert "does not parse" in text
    assert "| 0.30.0 | native |" in text
    assert text.count("```` ") == 0
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 1


def chromium() -> str | None:
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "-qq", "update"], check=False, capture_output=True)
        command = ["apt-get", "-qq", "-y", "--no-install-recommends", "install", "chromium"]
        subprocess.run(command, check=False, capture_output=True)
        found = shutil.which("chromium")
    return found


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1200, True)])
def test_a_browser_shows_it(reports: tuple[str, str, Path], width: int, dark: bool) -> None:
    browser = chromium()
    if browser is None:
        pytest.skip("NOT RUN: no Chromium here, and none could be installed")
    page = reports[2]
    probe = page.with_name("probe.html")
    # The page measures itself: nothing but the table may be wider than the window.
    script = (
        "<script>onload=()=>{const d=document.documentElement;"
        "document.title=[d.scrollWidth<=innerWidth,document.querySelectorAll('tr').length,"
        "getComputedStyle(document.body).backgroundColor].join(' ')}</script>"
    )
    probe.write_text(page.read_text().replace("</body>", script + "</body>"))
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--no-first-run",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={width},800",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        "--dump-dom",
        probe.as_uri(),
    ]
    child = subprocess.run(command, capture_output=True, text=True, timeout=120)
    title = re.search(r"<title>([^<]*)</title>", child.stdout)
    assert title, child.stderr[-2000:]
    fits, rows, colour = title.group(1).split(" ", 2)
    assert (fits, rows) == ("true", "5")
    assert colour == ("rgb(23, 24, 28)" if dark else "rgb(255, 255, 255)")
