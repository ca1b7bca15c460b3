"""Read a page back: its tables, its text, and whether it is well-formed and needs no other file."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """The tables, text and attributes of a page; raises AssertionError if it is not well-formed."""

    def __init__(self, text):
        super().__init__()
        self.open = []
        self.tables = {}
        self.attributes = []
        self.texts = []
        self.commands = []
        self._rows = None
        assert text.startswith("<!DOCTYPE html>\n<html")
        self.feed(text)
        self.close()
        assert self.open == [], "tags are left open"

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag in VOID:
            return
        self.open.append(tag)
        if tag == "table":
            self._rows = self.tables.setdefault(dict(attrs)["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        elif tag == "pre":
            self.commands.append("")

    def handle_endtag(self, tag):
        assert self.open, f"{tag} ends but never began"
        assert self.open[-1] == tag, f"{tag} ends inside {self.open[-1]}"
        self.open.pop()

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.texts.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self._rows[-1][-1] += data
        if self.open and self.open[-1] == "pre":
            self.commands[-1] += data

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def check_alone(page):
    """Assert that a page loads nothing, runs nothing, and defines each of its ids once."""
    tags = {tag for tag, _, _ in page.attributes}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    names = {name for _, name, _ in page.attributes}
    assert not {name for name in names if name in ("src", "href") or name.startswith("on")}
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    fills = {value for _, name, value in page.attributes if name == "fill" and "url" in value}
    used = {re.fullmatch(r"url\(#(.*)\)", fill)[1] for fill in fills}
    assert used <= set(ids)
