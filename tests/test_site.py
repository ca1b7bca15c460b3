"""The site of `make docs`: every page has a place, and every link of a page leads somewhere."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import PurePosixPath
from types import SimpleNamespace

import pytest

from docs.site import hooks
from tests.starts import ROOT, ended


def builder():
    """Return a Python that has the packages of `make docs`, or None."""
    if all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings")):
        return sys.executable
    path = ROOT / ".venv-docs" / "bin" / "python"
    return str(path) if path.with_name("mkdocs").exists() else None


@pytest.fixture
def checkout(tmp_path):
    """A small checkout: two pages, a program, a folder and a picture."""
    for name, content in {
        "README.md": "[all](docs/README.md), [plan](docs/tasks/plan.md#memory)\n",
        "CONTRIBUTING.md": "[the index](docs/README.md)\n",
        "CHANGELOG.md": "",
        "docs/README.md": (
            "[front](../README.md)\n\n## Start\n\n* [`Plan` a\n  run](tasks/plan.md): memory.\n\n"
            "## More\n\n* [Plan](tasks/plan.md) again, [other](other.md).\n"
        ),
        "docs/other.md": "",
        "docs/tasks/plan.md": (
            "`[no](link.md)` [a](../../tools/plan.py) ![b](../b.png) [c](../../configs)\n"
            "```\n[no](link.md)\n```\n"
            "[d](../../README.md#first), [e](https://a.b/c.md) [f](#here)\n"
        ),
        "docs/b.png": "",
        "tools/plan.py": "print('~~~')\n",
        "configs/tiny.toml": "[model]\n",
        "configs/.hidden": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def places(navigation):
    """List the addresses of a navigation, in order."""
    return [
        address
        for section in navigation
        for pages in section.values()
        for page in pages
        for address in page.values()
    ]


def test_every_page_has_one_place_in_the_navigation_and_every_place_a_page():
    addresses = places(hooks.navigation())
    assert len(set(addresses)) == len(addresses) > 60
    pages = {PurePosixPath(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")}
    expected = {hooks.site_address(page) for page in pages} | {"index.md"}
    expected |= set(hooks.PROJECT.values())
    expected |= {hooks.api_address(objects) for objects in hooks.API.values()}
    assert set(addresses) == expected
    assert set(addresses) - {address for address in expected if address.startswith("api/")} <= set(
        hooks.linked_files()
    )


def test_sections_of_the_index_are_those_of_the_navigation(checkout):
    sections = hooks.navigation(checkout)
    assert [name for section in sections for name in section] == ["Start", "More", "API", "Project"]
    assert sections[0]["Start"] == [
        {"Longmesh": "index.md"},
        {"All pages": "contents.md"},
        {"Plan a run": "tasks/plan.md"},
    ]
    assert sections[1]["More"] == [{"other": "other.md"}]
    (checkout / "docs" / "lost.md").touch()
    assert "lost.md" not in places(hooks.navigation(checkout))
    assert "lost.md" in hooks.linked_files(checkout)


def test_links_lead_to_the_same_file_in_the_site(checkout):
    page = PurePosixPath("docs/tasks/plan.md")
    text = (checkout / page).read_text()
    assert hooks.relink(text, page, checkout) == (
        "`[no](link.md)` [a](../files/tools/plan.py.md) ![b](../b.png) [c](../files/configs.md)\n"
        "```\n[no](link.md)\n```\n[d](../index.md#first), [e](https://a.b/c.md) [f](#here)\n"
    )
    assert hooks.relink("[a](docs/README.md#x)", PurePosixPath("README.md"), checkout) == (
        "[a](contents.md#x)"
    )
    files = hooks.linked_files(checkout)
    assert {address: str(path) for address, path in files.items() if "files/" in address} == {
        "files/tools/plan.py.md": "tools/plan.py",
        "files/configs.md": "configs",
        "files/configs/tiny.toml.md": "configs/tiny.toml",
    }


def test_a_link_that_leads_nowhere_is_refused(checkout):
    (checkout / "docs" / "other.md").write_text("[x](../none.md)")
    with pytest.raises(FileNotFoundError, match=r"docs/other.md links to ../none.md"):
        hooks.linked_files(checkout)


def git(folder, *words):
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


class Sources(list):
    """The files that MkDocs found: only their paths."""

    def __init__(self, *paths):
        super().__init__(SimpleNamespace(abs_src_path=str(path)) for path in paths)


def test_only_tracked_files_are_published(checkout):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    (checkout / "configs" / "secret.toml").write_text("token = 1\n")
    (checkout / "docs" / "draft.md").write_text("[own](../notes.txt)")
    (checkout / "notes.txt").touch()
    theme = checkout.parent / "theme.css"
    files = hooks.linked_files(checkout)
    assert "files/configs/tiny.toml.md" in files
    assert not any("secret" in address or "draft" in address for address in files)
    assert "secret" not in hooks.file_page(PurePosixPath("configs"), checkout)
    sources = Sources(checkout / "docs" / "draft.md", checkout / "docs" / "other.md", theme)
    hooks.remove_untracked(sources, checkout)
    assert [file.abs_src_path for file in sources] == [str(checkout / "docs/other.md"), str(theme)]


def test_a_link_to_an_untracked_file_is_refused(checkout):
    git(checkout, "init", "-q")
    git(checkout, "add", ".")
    (checkout / "notes.txt").touch()
    (checkout / "docs" / "other.md").write_text("[x](../notes.txt)")
    with pytest.raises(FileNotFoundError, match=r"docs/other.md links to ../notes.txt, which git"):
        hooks.linked_files(checkout)


def test_an_export_without_git_says_that_all_files_are_published(checkout, caplog):
    with caplog.at_level("INFO", logger=hooks.logger.name):
        assert hooks.linked_files(checkout)
    assert f"no .git in {checkout}" in caplog.text


def test_a_checkout_that_git_cannot_list_is_refused(checkout):
    (checkout / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(RuntimeError, match="only tracked files are published: fatal"):
        hooks.linked_files(checkout)


@pytest.mark.parametrize("is_tracked", [True, False])
def test_paths_out_of_the_checkout_are_refused(checkout, is_tracked):
    outside = checkout.parent / f"{checkout.name} secret.md"
    outside.write_text("password")
    (checkout / "configs" / "tiny.toml").unlink()
    (checkout / "configs" / "tiny.toml").symlink_to(outside)
    (checkout / "docs" / "linked.png").symlink_to(outside)
    if is_tracked:
        git(checkout, "init", "-q")
        git(checkout, "add", ".")
    with pytest.raises(ValueError, match=r"configs/tiny.toml leads out of the checkout"):
        hooks.linked_files(checkout)
    with pytest.raises(ValueError, match=r"docs/linked.png leads out of the checkout"):
        hooks.remove_untracked(Sources(checkout / "docs" / "linked.png"), checkout)
    (checkout / "docs" / "tasks" / "plan.md").write_text("[x](../../..)")
    with pytest.raises(ValueError, match=r"\.\. leads out of the checkout"):
        hooks.linked_files.__wrapped__(checkout)


def test_a_file_that_is_not_utf_8_is_named(checkout):
    (checkout / "tools" / "plan.py").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"tools/plan.py is not UTF-8 text"):
        hooks.file_page(PurePosixPath("tools/plan.py"), checkout)


def test_files_and_folders_that_pages_link_to_have_pages(checkout):
    assert hooks.file_page(PurePosixPath("tools/plan.py"), checkout) == (
        "# plan.py\n\n`tools/plan.py`\n\n~~~~~~python\nprint('~~~')\n\n~~~~~~\n"
    )
    assert hooks.file_page(PurePosixPath("configs"), checkout) == (
        "# configs\n\n`configs`\n\n* [tiny.toml](configs/tiny.toml.md)\n"
    )
    for path in hooks.linked_files().values():
        if (ROOT / path).is_file() and path.suffix not in (".md", *hooks.PICTURES):
            assert hooks.FENCE not in (ROOT / path).read_text(encoding="utf-8"), path


def test_formulas_become_mathml():
    html = r'<p>a <span class="arithmatex">\(a &lt; b\)</span> b</p>'
    assert (
        hooks.mathml(html, lambda text: f"<math>{text}</math>") == "<p>a <math>a < b</math> b</p>"
    )


def test_a_page_that_commonmark_reads_otherwise_is_seen():
    html = "<h1 id=a>x</h1><ul><li>one<li>two</ul><em>x</em>"
    assert hooks.other_tags(html, "<h1>x</h1><ul><li>one<li>two</ul><em>x</em>") == {}
    assert hooks.other_tags(html, "<h1>x</h1><ul><li>one</ul>*x*") == {"li": 1, "em": 1}


@pytest.mark.skipif(builder() is None, reason="MkDocs is not installed; `make docs` installs it")
def test_the_site_is_built_strictly_and_asks_no_other_host(tmp_path):
    command = [builder(), "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    done = ended(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"written: {os.path.relpath(tmp_path / 'index.html', ROOT)}\n")
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 100
    for page in pages:
        html = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|img|iframe)\b[^>]*[\"'](?:https?:)?//", html), page

    start = (tmp_path / "index.html").read_text(encoding="utf-8")
    for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            assert f">{line[3:]}<a" in start
    for package, *_ in hooks.API.values():
        api = (tmp_path / "api" / f"{package}.html").read_text(encoding="utf-8")
        for name in importlib.import_module(package).__all__:
            assert re.search(rf'id="{package}\.({name}\.)?{name}"', api), name
    assert "<math" in (tmp_path / "concepts" / "linear_attention.html").read_text(encoding="utf-8")
