"""Figures in the pages of evidence and of the papers.

Each stands in a result file that its page leads to.

A section's result files are those that it links to, and those of ``bench/results`` that their
README says are told there; what stands before the first section quotes them all. A figure is a
decimal, a power of ten or an integer such as 12,345; code, links and multiples of 256, which are
sizes, are left out. It must be what a result rounds to: in a row of a table, of the records that
have the row's first cell as a name, where there are any. Where a column's head says that it
compares, it may be a quotient of the result's figures that belong together, or of the row's own.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from tests.starts import ROOT
from tests.test_docs import anchor

RESULTS = ROOT / "bench" / "results"
PAGES = [*sorted((ROOT / "docs" / "evidence").glob("*.md")), ROOT / "docs" / "tasks" / "papers.md"]
NUMBER = r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+\.\d+(?:e[-+]?\d+)?|\d+e[-+]?\d+"
FIGURE = re.compile(rf"(?<![\w.,^/-])({NUMBER})(?![\w^]|[.,]\d)(?= ?(%)?)")
NUMERIC = r"(?<![^,])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?(?![^,])"
NOT_PROSE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", flags=re.M | re.S)
COMPARES = re.compile(r"/|\b(of|by)\b|faster|difference|error")
SCALES, PERCENT, AS_IT_IS = (1.0, 1e-6, 2.0**-20), (100.0, 1.0), (1.0,)
"""To units on a page: seconds, MB and MiB of bytes, percent."""
TOGETHER = ("of", "length", "seq_length", "patches")
"""Records that have these in common belong together."""
CURVES = {"mean"}
"""Lists of which pages quote points."""
OTHERS = {"machine", "load", "load_average", "min", "max", "cpu_median"}
BY_TESTS = "what tests print, which assert the bounds beside it; no file keeps it"
LEFT_OUT = {
    ("not_measured.md", ""): "what is wanted of a figure once it is measured",
    ("exactness.md", "Exactness"): BY_TESTS,
    ("exactness.md", "Errors of linear attention's kernels"): BY_TESTS,
}
"""Sections by page and title, a page's whole where there is none, that have no figure of a result.
"""
ALLOWED = {
    "memory.md": {
        "32.5": "bytes added up in the sentence",
        "7.5": "a bound, of the test that is named",
        "9.3": "the difference of a row's two figures",
        "6e-8": "the difference of losses that have 8 digits in the file",
    },
    "model_peers.md": {"1e-3 1e-4 1e-5": "bounds of the program"},
    "mixed_documents.md": {"1.3": "a limit", "1.18 1.71": "quotients of a row's figures"},
    "papers.md": {
        "12.8 18.6": (
            "differences of returns in standard errors, which papers.trajectories.attempts prints"
        ),
        (
            "1,000 12.6 23.9 72.1"
        ): "steps of the paper's trajectories, and predictions that papers.ring prints",
        "114.33": "the paper's own",
        "162.6": "the paper's own, which papers.ring predicts",
        "0.29 5.2e-7": "differences of losses, which papers.convergence prints",
        "2602.21196": "a paper's number",
        "81.9": "the memory in a cluster's file",
    },
    "prediction_errors.md": {
        "1.19 1.59": "constants of planner/layers/float8.py",
        "16.9": "a constant of papers/striped.py",
        "13.42": "12.5 GiB in GB",
        "81.9": "the memory in a cluster's file",
        "2408.16978 2506.13996": "papers' numbers",
        "4.6": "another page's",
    },
    "slow_links.md": {
        "1.38": "a paper's",
        "3.6": "a weight of planner/choice.py",
        "5.21": "a quotient of the table below",
    },
    "speed.md": {
        "7.0": "a setting",
        "1,197": "rows counted on a plan",
        "1.02": "a quotient of two medians",
        "1.33": "a ratio of pairs, counted on a plan",
        "1.09 1.94 1.99": "logarithms of the table's quotients",
        "1.31": "a version",
        "1.183 1.193 1.197 1.207 1.231 10.9 13.3 27.1 28.4": "medians that the page alone keeps",
        (
            "1.084 1.067 1.104 1.098 1.078 1.118 1.037 1.079 1.076 1.048 1.107"
        ): "an idle run that it alone keeps",
        "1.163 1.205 1.211 1.218": "and another one",
    },
}
"""Other figures, several of one reason at once, that no result has and why they may stand."""


@dataclass
class Record:
    """A line of a result.

    Its names, its numbers, and how many digits those have that are printed only.
    """

    names: set[str]
    values: set[float] = field(default_factory=set)
    printed: set[str] = field(default_factory=set)

    def has(self, figure, scales):
        return any(rounds_to(value, figure, scales) for value in self.values) or any(
            digits(text) >= digits(figure)
            and rounds_to(number(text), figure, scales if "e" in text else AS_IT_IS)
            for text in self.printed
        )


def number(text):
    return float(text.replace(",", ""))


def digits(text):
    """Digits behind the point, and those of the power of ten."""
    mantissa, _, power = text.partition("e")
    return len(mantissa.partition(".")[2]) - (int(power) if power else 0)


def rounds_to(value, figure, scales):
    """True if a value, rounded to the figure's digits, is the figure."""
    mantissa, _, power = figure.replace(",", "").partition("e")
    decimals = len(mantissa.partition(".")[2])
    if power:
        return float(f"{value:.{decimals}e}") == float(figure)
    return any(f"{abs(value) * scale:.{decimals}f}" == mantissa for scale in scales)


def results_of(page, text):
    """The result files of a section's text; of a table with its Markdown that alone."""
    paths = {
        (page.parent / link).resolve()
        for link in re.findall(r"\]\(([^)#]*/results/[^)#]+)\)", text)
    }
    link_forms = [
        f"/{page.name}#{anchor(title)})" for title in re.findall(r"^## (.+)$", text, flags=re.M)
    ]
    readme = RESULTS / "README.md"
    for names, results_cell in re.findall(
        r"^\| (.+?) \|.*\| (.+?) \|$", readme.read_text(), flags=re.M
    ):
        for stem in (
            re.findall(r"`(.*?)\.(?:jsonl|md)`", names)
            if any(place in results_cell for place in link_forms)
            else ()
        ):
            pattern = stem.replace("MACHINE", r"(?:amd|intel|nvidia)-[\w-]+")
            paths |= {path for path in readme.parent.iterdir() if re.fullmatch(pattern, path.stem)}
    return sorted(
        p
        for p in paths
        if p.suffix in (".md", ".csv")
        or (p.suffix == ".jsonl" and not p.with_suffix(".md").exists())
    )


def walk(value, name=""):
    """Strings and numbers of a record by the first name on their way.

    Samples, which are other lists of more than 3, are left out.
    """
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in OTHERS:
                yield from walk(inner, name or key)
    elif isinstance(value, list) and (len(value) <= 3 or name in CURVES):
        for inner in value:
            yield from walk(inner, name)
    elif isinstance(value, int | float | str) and not isinstance(value, bool):
        yield name, value


def read(files):
    """Return the records of results, and the quotients of those that belong together."""
    records, quotients = [], Record(set())
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        if path.suffix == ".md":
            for line in lines:
                printed = set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?", line))
                records.append(Record({cell.strip() for cell in line.split("|")}, printed=printed))
            continue
        if path.suffix == ".csv":
            numbers = (
                re.findall(NUMERIC, line.rpartition(",")[0]) for line in lines
            )  # its last column says who made it
            records += [Record(set(), set(map(float, row))) for row in numbers]
            continue
        groups = defaultdict(set)
        head = json.loads(lines[0])
        for line in map(json.loads, lines):
            parts = list(walk(line))
            names = {part for _, x in parts if isinstance(x, str) for part in (x, *x.split("/"))}
            records.append(Record(names, {float(x) for _, x in parts if not isinstance(x, str)}))
            for name, x in parts:
                if not isinstance(x, str):
                    groups[name, *map(line.get, TOGETHER)].add(float(x))
            if "tflops" in line and "matmul_tflops" in head:
                quotients.values.add(line["tflops"] / head["matmul_tflops"])
        for same in groups.values():
            quotients.values |= (
                {a / b for a, b in permutations(same, 2) if b} if len(same) <= 8 else set()
            )
    return records, quotients


def sections(page):
    """The texts of a page without code, the targets of links, and what is left out.

    The result files of each come last.
    """
    text = page.read_text(encoding="utf-8")
    for place, whole in enumerate(re.split(r"^(?=## )", text, flags=re.M)):
        for part in re.split(r"^#+ ", NOT_PROSE.sub("", whole), flags=re.M)[1:]:
            if not {(page.name, ""), (page.name, part.partition("\n")[0])} & LEFT_OUT.keys():
                yield (
                    part,
                    results_of(page, whole if place and page.parent.name == "evidence" else text),
                )


def figures(text):
    """Each figure of a text, whether in percent, its line, and the head of its column."""
    head = []
    for line in text.splitlines():
        cells = line.split("|") if line.startswith("|") else [line]
        head = head if len(cells) > 1 and head else cells
        for place, cell in enumerate(cells):
            for figure, percent in FIGURE.findall(cell):
                if "," not in figure or number(figure) % 256:
                    yield (
                        figure,
                        bool(percent),
                        line,
                        head[place] if len(head) == len(cells) > 1 else "",
                    )
        head = head if len(cells) > 1 else []


def is_known(occurrence, records, quotients):
    figure, percent, line, head = occurrence
    name = line.split("|")[1].strip(" *") if line.startswith("|") else ""
    named_records = (
        [
            known_record
            for known_record in records
            if name in known_record.names and known_record.values | known_record.printed
        ]
        if name
        else []
    )
    scales = PERCENT if percent else SCALES
    if any(record.has(figure, scales) for record in named_records or records):
        return True
    row = {number(x) for x in re.findall(rf"{NUMBER}|\d+", line)} if head else set()
    same = {a / b for a, b in permutations(row, 2) if b}
    compares = not head or COMPARES.search(head)
    return bool(compares) and (
        quotients.has(figure, scales) or Record(set(), same).has(figure, AS_IT_IS)
    )


def checked(page):
    """Each figure of a page, and whether a result has it."""
    for part, files in sections(page):
        evidence = read(files)
        for figure in figures(part):
            yield figure[0], is_known(figure, *evidence)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_stands_in_a_result(page):
    allowed = " ".join(ALLOWED.get(page.name, {})).split()
    unknown = sorted({figure for figure, is_given in checked(page) if not is_given})
    assert unknown == sorted(allowed), (
        "take the result's figure, or leave it out; what is allowed must be needed"
    )


def test_a_wrong_figure_is_named(tmp_path):
    (tmp_path / "results").mkdir()
    record = {
        "of": "rows",
        "key": "ring",
        "length": 2048,
        "median": 0.19287,
        "peak": 3 << 20,
        "seconds": [0.5] * 9,
    }
    lines = [
        {"benchmark": "one"},
        record,
        record | {"key": "zigzag", "median": 0.38577, "peak": 7 << 20},
    ]
    (tmp_path / "results" / "one.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    text = """# One [figures](../one/results/one.jsonl)

| | s | MiB | ring / it |
| --- | --- | --- | --- |
| ring | 0.193 | 3.0 | 1 |
| zigzag | {} | 7.0 | {} |

`0.777` of 2,048 tokens took {} s, 12 %, or 1.93e-1 s.
"""
    page, whole = tmp_path / "one.md", text.format("0.386", "0.50", "0.39").replace("../one/", "./")
    page.write_text(whole)
    assert [figure for figure, is_given in checked(page) if not is_given] == []
    page.write_text(whole.replace("0.39 s", "0.40 s"))
    assert [figure for figure, is_given in checked(page) if not is_given] == ["0.40"]
