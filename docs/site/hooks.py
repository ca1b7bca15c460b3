"""Hooks of MkDocs: the navigation, the start page, the API, and the files that pages link to.

mkdocs.yml names this file, and ``make docs`` runs it. Pages are written for GitHub and for an
editor: their links are paths in the checkout. ``relink`` turns these into paths of the site:

    README.md                 index.md, the start page
    docs/README.md            contents.md; its sections are also the navigation
    docs/PATH                 PATH
    CONTRIBUTING.md           CONTRIBUTING.md
    other pages and pictures  files/PATH
    other files, folders      files/PATH.md, a page that shows the file or lists the folder

Only files that git tracks are published, and none outside the checkout. Without .git, as in an
exported archive, all files are, and a line says so.
"""

import logging
import os.path
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from html import unescape
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
INDEX = PurePosixPath("docs/README.md")
PROJECT = {"Contribute": "CONTRIBUTING.md", "Changes": "CHANGELOG.md"}
API = {
    "Attention": ("parallel.context", "parallel.context.softmax.SoftmaxAttention"),
    "Models of transformers": ("parallel.transformers", "parallel.transformers.shard.shard"),
    "Models of diffusers": ("parallel.diffusers", "parallel.diffusers.shard.shard"),
}
"""A package and objects to add, keyed by their page's title.

An object is added if a package's object returns it, or if a module hides it: ``shard`` is a
function of the package and also the file that defines the function.
"""
LANGUAGES = {".py": "python", ".sh": "bash", ".toml": "toml", ".cff": "yaml", ".jsonl": "json"}
PICTURES = (".png", ".svg", ".jpg")
FENCE = "~~~~~~"
CODE_OR_LINK = re.compile(
    r"^```.*?^```$|`[^`]+`|\]\((?!https?:|mailto:|#)([^)\s#]+)(#[^)\s]*)?\)", re.M | re.S
)
FORMULA = re.compile(r'<span class="arithmatex">\\\((.+?)\\\)</span>', re.S)
TAG = re.compile(r"<(h[1-6]|ul|ol|li|tr|th|td|pre|em|strong|img)\b")
logger = logging.getLogger("mkdocs.longmesh")


def on_config(config: "MkDocsConfig") -> None:
    """Set the navigation."""
    config.nav = navigation()


def on_files(files: "Files", config: "MkDocsConfig") -> None:
    """Add the start page, the API, and the files outside docs/ that pages link to."""
    from mkdocs.structure.files import File

    index = files.get_file_from_path("README.md")
    assert index is not None
    files.remove(index)
    remove_untracked(files)

    for objects in API.values():
        files.append(File.generated(config, api_address(objects), content=api_page(objects)))
    for address, path in linked_files().items():
        if files.get_file_from_path(address) is not None:
            continue
        if path.suffix in (".md", *PICTURES):
            file = File.generated(config, address, abs_src_path=str(ROOT / path))
        else:
            file = File.generated(config, address, content=file_page(path))
        files.append(file)


def on_page_markdown(
    markdown: str, page: "Page", config: "MkDocsConfig", files: "Files"
) -> str | None:
    """Relink a page of the checkout; leave files that only links lead to out of the search."""
    address = page.file.src_uri
    if address.startswith("files/"):
        page.meta["search"] = {"exclude": True}
    path = linked_files().get(address)
    if path is None or path.suffix != ".md":
        return None  # file_page and api_page wrote it, with paths of the site
    return relink(markdown, path)


def on_page_content(html: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Convert a page's formulas, and warn if its structure is not that of CommonMark.

    Python-Markdown reads some lists and emphasis otherwise than GitHub; a page must suit both.
    """
    from latex2mathml.converter import convert
    from markdown_it import MarkdownIt

    path = linked_files().get(page.file.src_uri)
    if path is not None and path.suffix == ".md":
        text = text_of(path, ROOT)
        difference = other_tags(html, MarkdownIt("commonmark").enable("table").render(text))
        if difference:
            logger.warning("%s: here and by CommonMark it has other elements: %s", path, difference)
    return mathml(html, convert)


def on_post_build(config: "MkDocsConfig") -> None:
    """Print the start page's file, which --site-dir may have moved."""
    print(f"written: {os.path.relpath(os.path.join(config.site_dir, 'index.html'))}")


def navigation(root: Path = ROOT) -> list[dict[str, list[dict[str, str]]]]:
    """Return the navigation: sections and pages of docs/README.md in their order, the API, more.

    A page with several links stands at its first.
    """
    sections: dict[str, dict[str, str]] = {}
    listed = {"index.md", "contents.md", *PROJECT.values()}
    text = (root / INDEX).read_text(encoding="utf-8")
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        heading = part.partition("\n")[0]
        pages = sections.setdefault(heading, {})
        for title, link in re.findall(r"\[([^\]]+)\]\(([^)\s#]+\.md)\)", part):
            address = site_address(linked_path(link, INDEX), root)
            if address not in listed:
                listed.add(address)
                pages[" ".join(title.replace("`", "").split())] = address

    first = next(iter(sections))
    sections[first] = {"Longmesh": "index.md", "All pages": "contents.md", **sections[first]}
    sections["API"] = {title: api_address(objects) for title, objects in API.items()}
    sections["Project"] = PROJECT
    items = []
    for heading, pages in sections.items():
        items.append({heading: [{title: address} for title, address in pages.items()]})
    return items


@cache
def linked_files(root: Path = ROOT) -> dict[str, PurePosixPath]:
    """Return all pages and what their links lead to: paths in the checkout, keyed by addresses.

    Raises:
        FileNotFoundError: a link leads nowhere, or to a file that git does not track; the message
            names the page and the link.
        ValueError: a path leads out of the checkout, or a page is not UTF-8.
    """
    waiting = [PurePosixPath("README.md")]
    waiting += map(PurePosixPath, PROJECT.values())
    for page in sorted(root.glob("docs/**/*.md")):
        path = PurePosixPath(page.relative_to(root))
        if is_tracked(path, root):
            waiting.append(path)

    files: dict[str, PurePosixPath] = {}
    while waiting:
        path = waiting.pop()
        address = site_address(path, root)
        if address in files:
            continue
        files[address] = path
        check_inside(path, root)
        if (root / path).is_dir():
            waiting += files_of(path, root)
        elif path.suffix == ".md":
            waiting += links(path, root)
    return files


@cache
def tracked_paths(root: Path) -> frozenset[PurePosixPath] | None:
    """Return the files that git tracks and their folders; None if the checkout has no .git.

    Raises:
        RuntimeError: git cannot list the files.
    """
    if not (root / ".git").exists():
        logger.info("no .git in %s: all of its files that pages link to are published", root)
        return None
    try:
        command = ["git", "-C", str(root), "ls-files", "-z"]
        listed = subprocess.run(command, check=True, capture_output=True).stdout.decode("utf-8")
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", b"") or str(error).encode()
        raise RuntimeError(
            f"git cannot list the files of {root}, and only tracked files are published: "
            f"{why.decode(errors='replace').strip()}"
        ) from error
    paths: set[PurePosixPath] = set()
    for name in filter(None, listed.split("\0")):
        path = PurePosixPath(name)
        paths |= {path, *path.parents}
    return frozenset(paths)


def is_tracked(path: PurePosixPath, root: Path) -> bool:
    """Return whether git tracks a file, or a file in a folder; True for all without .git."""
    paths = tracked_paths(root)
    return paths is None or path in paths


def check_inside(path: PurePosixPath, root: Path) -> None:
    """Raise ValueError if a path leads out of the checkout, by a link of the file system or ``..``.

    Args:
        path: path in the checkout.
        root: folder of the checkout.
    """
    place = (root / path).resolve()
    if not place.is_relative_to(root.resolve()):
        raise ValueError(f"{path} leads out of the checkout, to {place}; it is not published")


def text_of(path: PurePosixPath, root: Path) -> str:
    """Return a file's text; raise ValueError, which names the file, if it is not UTF-8."""
    try:
        return (root / path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}); no page can show it") from error


def remove_untracked(files: "Files", root: Path = ROOT) -> None:
    """Remove what MkDocs found in docs/ but git does not track.

    Raises:
        ValueError: a file leads out of the checkout.
    """
    for file in list(files):
        source = file.abs_src_path
        if source is None or not Path(source).is_relative_to(root / "docs"):
            continue  # a file of the theme
        path = PurePosixPath(Path(source).relative_to(root))
        if is_tracked(path, root):
            check_inside(path, root)
        else:
            files.remove(file)
            logger.info("%s is left out: git does not track it", path)


def links(page: PurePosixPath, root: Path) -> list[PurePosixPath]:
    """Return the paths in the checkout that a page links to; web addresses are left out."""
    paths = []
    for match in CODE_OR_LINK.finditer(text_of(page, root)):
        if match[1]:
            path = linked_path(match[1], page)
            if not (root / path).exists():
                raise FileNotFoundError(f"{page} links to {match[1]}, which does not exist")
            check_inside(path, root)
            if not is_tracked(path, root):
                raise FileNotFoundError(
                    f"{page} links to {match[1]}, which git does not track; git add it, or leave "
                    "out the link"
                )
            paths.append(path)
    return paths


def linked_path(link: str, page: PurePosixPath) -> PurePosixPath:
    """Return the path in the checkout that a page's relative link leads to."""
    return PurePosixPath(os.path.normpath(page.parent / link))


def site_address(path: PurePosixPath, root: Path = ROOT) -> str:
    """Return the path among the site's sources of a file or folder of the checkout."""
    if path == PurePosixPath("README.md"):
        return "index.md"
    if path == INDEX:
        return "contents.md"
    if path.suffix not in (".md", *PICTURES) or (root / path).is_dir():
        return f"files/{path}.md"
    if path.is_relative_to("docs"):
        return str(path.relative_to("docs"))
    return str(path) if str(path) in PROJECT.values() else f"files/{path}"


def relink(text: str, page: PurePosixPath, root: Path = ROOT) -> str:
    """Return a page's Markdown with links to paths of the site; code stays as it is.

    Args:
        text: Markdown of the page.
        page: path of the page in the checkout.
        root: folder of the checkout.
    """
    folder = PurePosixPath(site_address(page, root)).parent

    def replace(match: re.Match[str]) -> str:
        if not match[1]:
            return match[0]
        address = site_address(linked_path(match[1], page), root)
        return f"]({os.path.relpath(address, folder)}{match[2] or ''})"

    return CODE_OR_LINK.sub(replace, text)


def api_address(objects: tuple[str, ...]) -> str:
    """Return the path among the site's sources of a page of the API."""
    return f"api/{objects[0]}.md"


def api_page(objects: tuple[str, ...]) -> str:
    """Return a page of the API, which mkdocstrings fills from the sources without importing."""
    package, *others = objects
    page = f"# `{package}`\n\n::: {package}\n"
    for name in others:
        page += f"\n::: {name}\n    options:\n"
        page += "      show_root_heading: true\n      show_root_full_path: false\n"
        page += "      show_root_toc_entry: true\n      merge_init_into_class: false\n"
        page += "      filters: ['!^_[^_]', '!^__init__$']\n"  # a user gets an object, and calls it
    return page


def files_of(folder: PurePosixPath, root: Path) -> list[PurePosixPath]:
    """Return the files of a folder that its page lists."""
    paths = []
    for path in sorted((root / folder).iterdir()):
        file = folder / path.name
        if path.is_file() and not path.name.startswith(".") and is_tracked(file, root):
            paths.append(file)
    return paths


def file_page(path: PurePosixPath, root: Path = ROOT) -> str:
    """Return a page that lists a folder's files, or shows a file that is no Markdown."""
    page = f"# {path.name}\n\n`{path}`\n\n"
    if not (root / path).is_dir():
        text = text_of(path, root)
        return page + f"{FENCE}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{FENCE}\n"
    folder = PurePosixPath(site_address(path, root)).parent
    for file in files_of(path, root):
        page += f"* [{file.name}]({os.path.relpath(site_address(file, root), folder)})\n"
    return page


def mathml(html: str, convert: Callable[[str], str]) -> str:
    """Return HTML with its formulas as MathML, which browsers draw without a script.

    Args:
        html: a page in which arithmatex has marked the formulas.
        convert: function from LaTeX to MathML.
    """
    return FORMULA.sub(lambda match: convert(unescape(match[1])), html)


def other_tags(html: str, reference: str) -> dict[str, int]:
    """Return the tags whose numbers differ, with the difference; empty if there are none."""
    counts = Counter(TAG.findall(html))
    counts.subtract(TAG.findall(reference))
    return {tag: count for tag, count in counts.items() if count}
