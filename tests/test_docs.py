"""The pages are true.

Links lead somewhere, commands and paths exist, and prose is readable in an editor.
"""

import ast
import importlib
import re
from functools import cache

import pytest

from tests.starts import ROOT

LONGEST_README, WIDEST = 150, 120
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`]+)`")
# Of pip, torchrun, accelerate, Slurm, unshare and nsenter.
OTHERS_FLAGS = """
    --extra-index-url --standalone --nnodes --nproc-per-node --rdzv-backend --rdzv-endpoint
    --signals-to-handle
    --shutdown-timeout --gpus-per-task --requeue --signal --batch --reservation --test-only --gres
    --cpus-per-task
    --kill-on-invalid-dep --export --distribution --cpu-bind --gpu-bind --numa-binding --local-dir
    --exclude --include
    --num-processes --mixed-precision --ntasks-per-node --user --map-root-user --net --target
""".split()


def pages(root):
    """The Markdown that people read.

    Beside the front page it is docs/, and what results say of themselves.
    """
    paths = [*root.glob("*.md"), *root.glob("docs/**/*.md")]
    return [
        path
        for path in [*paths, *root.glob("papers/**/*.md"), *root.glob("bench/**/*.md")]
        if path.exists()
    ]


def prose(page):
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def code(page):
    """The code of a page.

    It is the lines of its blocks, continued ones joined, and what stands between backticks.
    """
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```\w*\n(.*?)^```$", text, flags=re.M | re.S):
        yield from block.replace("\\\n", " ").splitlines()
    yield from SPAN.findall(prose(page))


def anchor(title):
    """The name that GitHub gives to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def anchors(page):
    """The names of a page's headings; the second heading of one name has -1 behind it."""
    names = []
    for title in re.findall(r"^#+ (.+)$", prose(page), flags=re.M):
        name = anchor(LINK.sub(lambda link: link[0][1:].partition("]")[0], title))
        names.append(f"{name}-{names.count(name)}" if name in names else name)
    return set(names)


def broken_links(page, root):
    """Links to what the checkout lacks or to no heading of a page.

    Links of forms that are not looked up are among them.
    """
    text = SPAN.sub("", prose(page))
    for link in LINK.findall(text):
        path, _, name = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if re.match(r"https?://[\w.-]+\.\w+(/|$)", link):
            continue
        is_known = (
            target.exists() and target.is_relative_to(root.resolve()) and not path.startswith("/")
        )
        if not is_known or (
            "#" in link and (target.suffix != ".md" or name not in anchors(target))
        ):
            yield link
    rest = LINK.sub("", LINK.sub("", text))  # a picture may be a link's text
    others = re.findall(
        r"\]\([^)]*\)?|\]\[.*?\]|^\[[^\]]+\]: .*|<(?:a|img)\b.*?>|<https?:.*?>", rest, flags=re.M
    )
    yield from (f"{other}, which is not [text](target)" for other in others)


def unknown_targets(page, root):
    targets = set(
        re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), flags=re.M)
    )
    named = {
        target
        for line in code(page)
        for target in re.findall(r"(?:^|[;(] ?)make ([a-z][a-z-]*)", line)
    }
    return named - targets


def unknown_modules(page, root):
    for module in {
        name for line in code(page) for name in re.findall(r"-m ([a-z_][\w.]*\w)", line)
    }:
        path = root / module.replace(".", "/")
        if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists()):
            yield f"python -m {module}"


def unknown_paths(page, root):
    """Files and folders of ours that a page names in backticks, or as a program or a --config."""
    tops = {path.name for path in root.iterdir() if path.is_dir()} - {"runs", "site"}
    words = r"(?<![\w./-])[\w.-]+(?:/[\w.-]+)*/?(?![\w/<*])"
    for word in {word for line in code(page) for word in re.findall(words, line)}:
        if re.search(r"(?<![A-Za-z])[A-Z]+(?![A-Za-z])", word.removesuffix("README.md")):
            continue  # a name to put in: NAME, METHOD
        ours = word.split("/")[0] in tops and "/" in word and not word.startswith("bench/results/")
        if (ours or re.fullmatch(r"pretrain_\w+\.py", word)) and not (root / word).exists():
            yield word


@cache
def sources(root):
    """The text of every source but those of tests that are no programs.

    No page may take a flag from these.
    """
    paths = [*root.glob("[a-z]*/**/*.py"), *root.glob("train/config/*.txt"), root / "Makefile"]
    texts = (
        (path.is_relative_to(root / "tests"), path.read_text(encoding="utf-8")) for path in paths
    )
    return "\n".join(
        text for of_tests, text in texts if not of_tests or "\n    run_command(main)" in text
    )


def unknown_flags(page, root):
    """Flags that stand in no source, neither as they are nor as the field that they are made of."""
    named = {
        flag for line in code(page) for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", line)
    }
    for flag in named.difference(OTHERS_FLAGS):
        field = flag[2:].replace("-", "_")
        made_of = rf"^    ({field}|{field.removeprefix('no_')}): "
        if flag not in sources(root) and not re.search(made_of, sources(root), flags=re.M):
            yield flag


def unknown_imports(page, root):
    """The names that blocks of Python import from our modules, and that these do not have."""
    ours = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    for block in re.findall(
        r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
    ):
        nodes = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom)]
        for module, name in {
            (str(node.module), alias.name) for node in nodes for alias in node.names
        }:
            if module.split(".")[0] in ours and not has(module, name):
                yield f"{module}.{name}"


def has(module, name):
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False


def wide_lines(page, root):
    """Lines of prose over 120 characters.

    Tables, code and the targets of links are as long as they must be.
    """
    for line in (
        prose(page).splitlines()
        if page.is_relative_to(root / "docs") or page.parent == root
        else ()
    ):
        if len(SPAN.sub("", re.sub(r"\]\([^)]*\)", "]", line))) > WIDEST and not line.startswith(
            "|"
        ):
            yield line


def long_readme(root):
    length = len((root / "README.md").read_text(encoding="utf-8").splitlines())
    if length > LONGEST_README:
        yield f"README.md: {length} lines"


def wrong_defaults(root):
    """Defaults in the table of a first run's flags that are not those of the page of all flags."""
    table, flags = (
        root / "docs" / "start" / "first_flags.md",
        root / "docs" / "reference" / "flags.md",
    )
    rows = re.findall(
        r"^\|[^|]*\| `(--[\w-]+)` \| *(.*?) *\|",
        table.read_text() if table.exists() else "",
        flags=re.M,
    )
    defaults = re.findall(
        r"^\| `(--[\w-]+)` \|[^|]*\| *(.*?) *\|", flags.read_text() if rows else "", flags=re.M
    )
    first = dict(reversed(defaults)) | {"--config": ""}
    yield from (f"{flag}: {default}" for flag, default in rows if first.get(flag) != default)


def unlisted(root):
    """Pages that the index does not name."""
    index = root / "docs" / "README.md"
    named = {
        (index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))
    }
    yield from (
        str(page.relative_to(root))
        for page in root.glob("docs/**/*.md")
        if page not in {*named, index}
    )


def unlisted_commands(root):
    """Targets of make and programs that the page of commands does not name."""
    page = (root / "docs" / "reference" / "commands.md").read_text(encoding="utf-8")
    targets = re.findall(
        r"^([a-z-]+):.* ## ", (root / "Makefile").read_text(encoding="utf-8"), flags=re.M
    )
    programs = [
        path
        for path in root.glob("[a-z]*/**/*.py")
        if path.parts[len(root.parts)] not in ("tests", "runs")
    ]
    programs = [
        path for path in programs if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    ]
    modules = [
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__main__")
        for path in programs
    ]
    named = [f"`make {target}`" for target in targets] + [
        f"`python -m {module}`" for module in modules
    ]
    yield from (name for name in named if name not in page and name != "`make help`")


OF_A_PAGE = (
    *(
        broken_links,
        unknown_targets,
        unknown_modules,
        unknown_paths,
        unknown_flags,
        unknown_imports,
    ),
    wide_lines,
)
OF_ALL = (long_readme, wrong_defaults, unlisted, unlisted_commands)


def wrong(check, root):
    """List the findings of a check, after the page where it is one of a page."""
    if check in OF_ALL:
        return [*check(root)]
    return [
        f"{page.relative_to(root)}: {problem}"
        for page in pages(root)
        for problem in sorted(check(page, root))
    ]


@pytest.mark.parametrize("check", OF_A_PAGE + OF_ALL)
def test_the_pages(check):
    assert len(pages(ROOT)) > 20
    assert wrong(check, ROOT) == []


PLANTED = [
    (broken_links, "[its part](docs/README.md#none)"),
    (unknown_targets, "`make nothing`"),
    (unknown_modules, "`python -m tools.none`"),
    (unknown_paths, "`tools/none.py`"),
    (unknown_flags, "`--none 4`"),
    (unknown_imports, "```python\nfrom kernels.reference import nothing\n```"),
    (wide_lines, "word " * 25),
    (long_readme, "word\n\n" * 76),
    (wrong_defaults, ""),
    (unlisted, ""),
    (unlisted_commands, ""),
]


@pytest.mark.parametrize(("check", "text"), PLANTED)
def test_what_is_wrong_is_seen(tmp_path, check, text):
    for name, content in {
        "README.md": "",
        "Makefile": "some: ## Something\n",
        "tools/some.py": "parser.add_argument('--some')\nclass C:\n    other: int = 0\n",
        "configs/some.toml": "",
        "docs/README.md": "# One\n\n[some](some.md), [commands](reference/commands.md)\n",
        "docs/reference/commands.md": "`make some`",
        "docs/some.md": (
            "[the index](README.md#one), `make some`, `python -m tools.some --some 1 --no-other`\n"
        ),
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(content)
    assert wrong(check, tmp_path) == []
    (tmp_path / "README.md").write_text(text)
    if check is wrong_defaults:
        (tmp_path / "docs" / "start").mkdir()
        (tmp_path / "docs" / "start" / "first_flags.md").write_text(
            "| a | `--some` | `2` | |\n| | `--other` | | |\n"
        )
        (tmp_path / "docs" / "reference" / "flags.md").write_text(
            "| `--some` | N | `1` | |\n| `--other` | N |  | |\n"
        )
    if check is unlisted:
        (tmp_path / "docs" / "lost.md").touch()
    if check is unlisted_commands:
        (tmp_path / "tools" / "other.py").write_text('if __name__ == "__main__":\n    pass\n')
    assert len(wrong(check, tmp_path)) == 1
