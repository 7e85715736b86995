"""The links of a package index's HTML page."""

from __future__ import annotations

from html.parser import HTMLParser


class Links(HTMLParser):
    """(text, href) of each link of an HTML index page."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[str, str]] = []
        self._href: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._href = dict(attrs).get("href") if tag == "a" else None

    def handle_data(self, data: str) -> None:
        if self._href:
            self.pairs.append((data.strip(), self._href))
            self._href = None
