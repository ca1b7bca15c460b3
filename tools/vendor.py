"""Write only the attention as a package `longmesh_attention`, to vendor in another project.

The package holds parallel/context, parallel/transformers, parallel/diffusers, kernels and runtime,
with their imports and the namespace of their custom operators renamed, so that a project with
folders of these names can import it, even beside a checkout.

    python -m tools.vendor ../mine                   # writes or updates ../mine/longmesh_attention
    python -m tools.vendor wheels --package my_ring  # writes a project wheels/my_ring and its wheel
"""

import ast
import json
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from keyword import iskeyword
from pathlib import Path

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import __version__
from runtime.errors import UserError
from runtime.files import fsync, owned, sha256, unwritable
from runtime.machine import ROOT, commit_of
from tools.common.arguments import one_line_errors, parser_for, run_command
from tools.common.renaming import PACKAGE, PARTS, renamed

ORIGIN = "ORIGIN.json"
TEMPLATES = ROOT / "tools/templates"
TESTS = (
    "parallel/context/test_over.py",
    "parallel/diffusers/cases.py",
    "parallel/diffusers/draws.py",
    "parallel/diffusers/image_models.py",
    "parallel/diffusers/video_models.py",
    "parallel/diffusers/test_packing.py",
    "parallel/diffusers/test_refusals.py",
    "parallel/diffusers/test_shard.py",
    "parallel/diffusers/test_training.py",
    "parallel/transformers/families.py",
    "parallel/transformers/test_batch.py",
    "parallel/transformers/test_probe.py",
    "parallel/transformers/test_shard.py",
    "parallel/transformers/test_training.py",
)
"""Tests of longmesh, in tests/, that need only the vendored package; --package copies them."""


def package(name: str = PACKAGE, namespace: str | None = None) -> dict[str, bytes]:
    """Return the contents of the package's files, keyed by relative path.

    The same checkout gives the same bytes. ``namespace`` is that of the package's custom operators,
    by default the package's name.

    Raises UserError if a file imports a longmesh module that is not in the package, or has an
    import that cannot be renamed.
    """
    files: dict[str, bytes] = {}
    paths = []
    for module, part in PARTS.items():
        folder = ROOT.joinpath(*module.split("."))
        sources = {path: Path(part, path.relative_to(folder)) for path in folder.rglob("*.py")}
        if not folder.is_dir():
            folder = folder.with_suffix(".py")
            sources = {folder: Path(f"{part}.py")}
        paths.append(folder.relative_to(ROOT).as_posix())
        for path, target in sorted(sources.items()):
            content = renamed(path.read_bytes(), path.relative_to(ROOT), name, namespace)
            files[target.as_posix()] = content
    commit = commit_of(ROOT, *paths, "LICENSE")

    names = _public_names(ROOT / "parallel/context/__init__.py")
    imported = "".join(f"    {public},\n" for public in names)
    listing = "".join(f'    "{public}",\n' for public in sorted([*names, "process_group"]))
    init = template("__init__.py", name=name, commit=commit, imported=imported, listing=listing)
    files["__init__.py"] = init.encode()
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()

    programs = {path.stem for path in ROOT.glob("*.py")}
    _check_imports(files, _our_packages() | programs, name)
    return with_origin(files, commit)


def _our_packages() -> set[str]:
    return {path.parent.name for path in ROOT.glob("*/*.py")}


def _public_names(path: Path) -> list[str]:
    """Return the sorted names of a module's ``__all__``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return sorted(ast.literal_eval(statement.value))
    raise AssertionError(f"{path} has no __all__; define it with the public names")


def with_origin(files: dict[str, bytes], commit: str) -> dict[str, bytes]:
    """Add ``ORIGIN``: the version and commit that the files come from, and their digests."""
    digests = {name: sha256(files[name]) for name in sorted(files)}
    origin = {"project": "longmesh", "version": __version__, "commit": commit, "files": digests}
    return {**files, ORIGIN: (json.dumps(origin, indent=1) + "\n").encode()}


def template(file: str, **values: str) -> str:
    """Return a file of the package or its project: a template filled in with ``values``."""
    text = (TEMPLATES / f"{file}.in").read_text(encoding="utf-8")
    return text.format(version=__version__, **values)


def _check_imports(files: dict[str, bytes], ours: set[str], package: str = PACKAGE) -> None:
    """Raise UserError if a file imports a longmesh module that the vendored package lacks."""
    modules = set()
    for name in files:
        path = f"{package}/{name}".removesuffix(".py").removesuffix("/__init__")
        modules.add(path.replace("/", "."))

    for name, content in files.items():
        if not name.endswith(".py"):
            continue
        for module in _imported_modules(content):
            top = module.split(".")[0]
            is_ours = top in ours - {package}
            is_missing = top == package and module not in modules
            if is_ours or is_missing:
                raise UserError(
                    f"{name} of the package imports {module}, but that is not in the package; "
                    "move what the file needs into the package"
                )


def _imported_modules(source: bytes) -> Iterator[str]:
    """Yield the modules that a file imports, also inside functions."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def write(destination: Path, files: dict[str, bytes], name: str = PACKAGE) -> Path:
    """Write the package into a folder, whole or not at all; return its path.

    Raises UserError if the folder is not writable, or if the target was not written by this command
    or was changed since; InUseError if another process writes there; OSError if a file cannot be
    written.
    """
    target = destination / name
    why = unwritable(destination, "name another folder")
    if why:
        raise UserError(f"DEST is {destination}, {why}")

    with owned(destination, name):
        _check_target(target)
        draft = destination / f".{name}.{uuid.uuid4().hex}"
        old = destination / f".{name}.{uuid.uuid4().hex}"
        try:
            for path, content in files.items():
                (draft / path).parent.mkdir(parents=True, exist_ok=True)
                (draft / path).write_bytes(content)

            for written in (*draft.rglob("*"), draft):
                fsync(written)
            # Nothing runs between the two renames: a kill there would leave no package at all.
            if target.exists():
                target.rename(old)
            draft.rename(target)
            fsync(destination)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)
            for leftover in (draft, old):
                shutil.rmtree(leftover, ignore_errors=True)

    return target


def _check_target(target: Path) -> None:
    """Raise UserError unless the target is free, or holds an unmodified package of this command."""
    fix = "move it away, or name another folder"
    if target.is_symlink():
        raise UserError(f"{target} is a symlink, but this command writes only folders; {fix}")
    if not target.exists():
        return

    try:
        files = json.loads((target / ORIGIN).read_text(encoding="utf-8"))["files"]
        written = {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{target} was not written by this command (no valid {ORIGIN} in it); {fix}"
        ) from None

    for name in list(written):
        for parent in Path(name).parents:
            if parent.name:
                written[parent.as_posix()] = "folder"

    written[ORIGIN] = sha256(target / ORIGIN)

    present = _contents(target)
    for name in sorted(present.keys() | written.keys()):
        if present.get(name) == written.get(name):
            continue
        how = "changed"
        if name not in written:
            how = "added"
        elif name not in present:
            how = "removed"

        raise UserError(f"{target / name} was {how} since the package was written; {fix}")


def _contents(folder: Path) -> dict[str, str]:
    """Return a folder's entries, keyed by relative path: a file's digest, or the entry's kind.

    Python's caches are left out.
    """
    contents = {}
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if path.is_symlink():
            kind = "link"
        elif "__pycache__" in relative.parts:
            continue
        elif path.is_file():
            kind = sha256(path)
        else:
            kind = "folder" if path.is_dir() else "device"
        contents[relative.as_posix()] = kind

    return contents


def _name(text: str) -> str:
    """Return a package's name, after checking it.

    Raises UserError if it is not a valid module name, or names a module of Python, longmesh or a
    library that the package imports.
    """
    others = {"diffusers", "transformers", "torch", "numpy"} | sys.stdlib_module_names
    if not text.isidentifier() or iskeyword(text) or text in _our_packages() | others:
        raise UserError(
            f"--package is {text!r}; give a valid Python module name that no other module has"
        )

    return text


def project(name: str, package: dict[str, bytes], commit: str) -> dict[str, bytes]:
    """Return the files of a project with the package and its tests, keyed by relative path."""
    files = {f"src/{name}/{path}": content for path, content in package.items()}
    for file in ("pyproject.toml", "README.md"):
        files[file] = template(file, name=name, commit=commit).encode()

    files["LICENSE"] = package["LICENSE"]

    inits = {}
    for path in TESTS:
        test = Path("tests", path)
        files[test.as_posix()] = renamed((ROOT / test).read_bytes(), test, name)
        for parent in test.parents:
            if parent.name:
                inits[f"{parent.as_posix()}/__init__.py"] = b""

    return files | inits


def wheel(destination: Path, files: dict[str, bytes]) -> Path:
    """Build the project's wheel into a folder, with this environment's setuptools; return its path.

    Raises UserError if it cannot be built; the message quotes the end of pip's output.
    """
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "project")
        for path, content in files.items():
            (source / path).parent.mkdir(parents=True, exist_ok=True)
            (source / path).write_bytes(content)

        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
        command = [*pip, "-w", folder, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(
                "the wheel could not be built; install pip and setuptools 77 or later here, or "
                f"leave --package out: {' '.join(done.stderr.split()[-60:])}"
            )

        (built,) = Path(folder).glob("*.whl")
        target = destination / built.name
        target.write_bytes(built.read_bytes())

    return target


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Write the package or, with --package, a project and its wheel."""
    parser = parser_for("python -m tools.vendor", __doc__)
    parser.add_argument(
        "destination",
        type=Path,
        metavar="DEST",
        help=f"folder to write {PACKAGE}/ into, such as a project",
    )
    parser.add_argument(
        "--package",
        metavar="NAME",
        help=(
            "write a project NAME/ with pyproject.toml and tests, and build its wheel; "
            "their only module is NAME"
        ),
    )
    args = parser.parse_args(argv)

    name = PACKAGE if args.package is None else _name(args.package)
    commit_before = commit_of()
    files = package(name)
    origin = json.loads(files[ORIGIN])
    commit = origin["commit"]
    if args.package is not None:
        files = with_origin(project(name, files, commit), commit)
    target = write(args.destination, files, name)
    print(f"wrote {target}: {len(files)} files of longmesh {origin['version']}, commit {commit}")
    if args.package is not None:
        built = wheel(args.destination, files)
        print(f"built {built}: {built.stat().st_size / 1000:.0f} KB; pip install {built}")
    if commit_before != commit_of():
        print(
            f"note: {args.destination} lies in this checkout, where git sees it, so results from "
            'now on are marked "with changes"; move it, or write to runs/ or outside'
        )


if __name__ == "__main__":
    run_command(main)
