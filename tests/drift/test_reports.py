"""The reports: Markdown for an issue, one HTML page that a browser shows without anything else."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from distribution import program

from .conftest import edit_tree, run

pytestmark = pytest.mark.xdist_group("drift")
MODEL = "models/deepseek_v4/nvidia/model.py"
DISPATCHER = "v1/cudagraph_dispatcher.py"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, Path]:
    """(Markdown, HTML, HTML file) of a run with drifted trees, good ones, a native one, none."""
    tmp_path = tmp_path_factory.mktemp("reports of a long name")
    edits = {MODEL: lambda s: s.replace("class DeepseekV4MoE", "class <Renamed>")}
    tree = edit_tree(tmp_path / "next", "0.29.0", edits)
    last = edit_tree(
        tmp_path / "last", "0.29.0", {DISPATCHER: lambda s: s.replace("CudagraphDispatcher", "D")}
    )
    other = tmp_path / "other" / "flashinfer" / "mla"
    other.mkdir(parents=True)
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    absent = str(tmp_path / "<absent>")
    named = [str(tree), str(last), "0.29.0", "0.30.0", absent, str(other.parents[1])]
    run(*named, "--report", str(page), "--report", str(text))
    return text.read_text(), page.read_text(), page


class Checker(HTMLParser):
    """Collects what a self-contained, well-formed and readable page must not or must have."""

    VOID = {"meta", "br", "hr", "link", "img"}

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str]]] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, dict[str, str], str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = (tag, {name: value or "" for name, value in attrs})
        self.tags.append(element)
        if tag not in self.VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop()[0] == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts += [(tag, attributes, data) for tag, attributes in self.open]

    def values(self, *names: str) -> list[str]:
        return [had[name] for _, had in self.tags for name in had if name in names]

    def text(self, element: dict[str, str]) -> str:
        """What is written in an element."""
        return "".join(data for _, attributes, data in self.texts if attributes is element).strip()


def test_page_is_well_formed_and_alone(reports: tuple[str, str, Path]) -> None:
    page = Checker(reports[1])
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
    assert "<Renamed>" not in reports[1] and "&lt;absent&gt;" in reports[1]
    assert re.search(r"<time>20\d\d-\d\d-\d\d \d\d:\d\d UTC</time>", reports[1])


def test_links_lead_from_cells_to_findings(reports: tuple[str, str, Path]) -> None:
    page = Checker(reports[1])
    ids, links = page.values("id"), page.values("href", "src")
    assert len(ids) == len(set(ids)) == 6 + 3  # rows and findings
    assert set(links) == {f"#{id_}" for id_ in ids}
    red = [cell for cell in re.findall(r"<td class=.*?</td>", reports[1]) if "DRIFTED" in cell]
    assert len(red) == 4  # the renamed class is one finding of two columns
    targets = [re.search(r'href="#([^"]+)"', cell)[1] for cell in red]
    assert len(set(targets)) == 3
    for target in targets:
        assert f'<h3 id="{target}">' in reports[1]


def test_a_page_can_be_read_by_everyone(reports: tuple[str, str, Path]) -> None:
    page = Checker(reports[1])
    tags = [tag for tag, _ in page.tags]
    assert ("html", {"lang": "en"}) in page.tags
    assert tags.count("h1") == tags.count("title") == tags.count("main") == 1
    assert tags.count("caption") == tags.count("table") == 2
    assert all(had.get("scope") in ("row", "col") for tag, had in page.tags if tag == "th")
    assert all(page.text(had) for tag, had in page.tags if tag in ("a", "th", "summary"))
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h\d", tag)]
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert [had for tag, had in page.tags if tag == "pre"] == [{"tabindex": "0"}]


def luminance(colour: str) -> float:
    """https://www.w3.org/TR/WCAG22/#dfn-relative-luminance"""
    digits = colour.strip("#")
    digits = "".join(d * 2 for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_contrast_is_enough_in_light_and_dark(reports: tuple[str, str, Path]) -> None:
    style = reports[1].partition("<style>")[2].partition("</style>")[0]
    schemes = [dict(re.findall(r"--(\w+): (#\w+)", part)) for part in style.split("@media")[:2]]
    assert set(re.findall(r"[\s{]color: ([^;]+);", style)) == {"var(--text)", "inherit"}
    grounds = set(re.findall(r"background: var\(--(\w+)\)", style))
    assert grounds == set(schemes[0]) - {"text", "line"}
    for scheme in schemes:
        for ground in grounds:
            dark, light = sorted(luminance(scheme[name]) for name in ("text", ground))
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (ground, scheme)


def test_cells_differ_in_text_too(reports: tuple[str, str, Path]) -> None:
    by_class: dict[str, set[str]] = {}
    page = Checker(reports[1])
    for tag, attributes in page.tags:
        if tag == "td":
            name = attributes["class"].split()[-1]
            by_class.setdefault(name, set()).add(page.text(attributes))
    assert {"applies", "n-a", "native", "drifted", "error"} == set(by_class)
    texts = [text for found in by_class.values() for text in found]
    assert len(texts) == len(set(texts))
    # A phone shows the sign alone.
    assert len({text[0] for text in texts}) == len(texts)


def test_markdown_names_the_cause(reports: tuple[str, str, Path]) -> None:
    text = reports[0]
    assert "does not parse" in text
    assert "| 0.30.0 | native |" in text
    assert text.count("```` ") == 0
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({row.count("|") for row in rows}) == 2  # vLLM's table and FlashInfer's
    assert re.search(r"^Judged 20\d\d-\d\d-\d\d ", text, re.MULTILINE)
    assert text.count("## ") == 3 and text.count("- next: ") == 3


@pytest.mark.parametrize(("width", "dark"), [(390, False), (1200, True)])
def test_a_browser_shows_it(reports: tuple[str, str, Path], width: int, dark: bool) -> None:
    browser = program("chromium", "chromium-browser")
    if browser is None:
        pytest.skip("NOT RUN: no Chromium here, and none could be installed")
    page = reports[2]
    probe = page.with_name("probe.html")
    # The page measures itself: nothing is wider than the window, and each red cell is on screen.
    script = (
        "<script>onload=()=>{const d=document.documentElement;"
        "const seen=[...document.querySelectorAll('td.drifted')].filter(c=>{"
        "const r=c.getBoundingClientRect();return r.left>=0&&r.right<=innerWidth&&r.width>12});"
        "const words=[...document.querySelectorAll('td .word')].filter(w=>w.offsetWidth>1);"
        "document.title=[d.scrollWidth<=innerWidth,seen.length,words.length>0,"
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
    fits, seen, words, colour = title.group(1).split(" ", 3)
    assert (fits, seen, words) == ("true", "4", "false" if width == 390 else "true")
    assert colour == ("rgb(23, 24, 28)" if dark else "rgb(255, 255, 255)")
