"""Write the attention alone, as one package `longmesh_attention` that another project keeps in its
own tree.

The package holds parallel/context, parallel/transformers, kernels and runtime, with their imports
and the namespace of their custom operators renamed, so that a project with folders of these names
can import it, even beside a checkout.

    python -m tools.vendor ../mine                   # writes ../mine/longmesh_attention, or brings
    it up to date python -m tools.vendor wheels --package my_ring  # writes wheels/my_ring, a
    project, and its wheel beside it
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from keyword import iskeyword
from pathlib import Path

if not __package__:  # started as a file: the packages lie one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runtime import __version__
from runtime.errors import UserError
from runtime.files import fsync, owned, sha256, unwritable
from runtime.machine import ROOT, commit_of
from tools.common.arguments import one_line_errors, parser_for, run_command

PACKAGE = "longmesh_attention"
PARTS = {
    "parallel.context": "context",
    "parallel.transformers": "transformers",
    "kernels": "kernels",
    "runtime": "runtime",
}
"""Our packages, and their names inside the package."""
OURS = re.compile(rf"({'|'.join(map(re.escape, PARTS))})\b")
NAMESPACE = "longmesh"
"""Namespace of our custom operators; a second library of the same name would silently replace them.
"""
ORIGIN = "ORIGIN.json"
TEMPLATES = ROOT / "tools/templates"
TESTS = (
    "parallel/context/test_over.py",
    "parallel/transformers/families.py",
    "parallel/transformers/test_batch.py",
    "parallel/transformers/test_probe.py",
    "parallel/transformers/test_shard.py",
    "parallel/transformers/test_training.py",
)
"""Tests of ours that need nothing but the package."""


def package(name: str = PACKAGE, namespace: str | None = None) -> dict[str, bytes]:
    """Return the package's files by relative path; the same checkout gives the same bytes.

    ``namespace`` is that of the package's custom operators, by default its name.

    Raises UserError: a file imports something of ours that is not in the package, or cannot be
    renamed.
    """
    folders = [module.replace(".", "/") for module in PARTS]
    commit = commit_of(ROOT, *folders, "LICENSE")
    files: dict[str, bytes] = {}
    for module, part in PARTS.items():
        folder = ROOT.joinpath(*module.split("."))
        for path in sorted(folder.rglob("*.py")):
            inside = (Path(part) / path.relative_to(folder)).as_posix()
            files[inside] = renamed(path.read_bytes(), path.relative_to(ROOT), name, namespace)
    tree = ast.parse((ROOT / "parallel/context/__init__.py").read_text(encoding="utf-8"))
    listed = next(
        x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "__all__"
    )
    names = sorted(ast.literal_eval(listed.value))
    imported = "".join(f"    {public},\n" for public in names)
    listing = "".join(f'    "{public}",\n' for public in sorted([*names, "process_group"]))
    face = template("__init__.py", name=name, commit=commit, imported=imported, listing=listing)
    files["__init__.py"] = face.encode()
    files["LICENSE"] = (ROOT / "LICENSE").read_bytes()
    ours = {path.parent.name for path in ROOT.glob("*/*.py")} | {
        path.stem for path in ROOT.glob("*.py")
    }
    _check_imports(files, ours, name)
    return with_origin(files, commit)


def with_origin(files: dict[str, bytes], commit: str) -> dict[str, bytes]:
    """Add a file that says where the others are from, and what they were when they were written."""
    digests = {name: sha256(files[name]) for name in sorted(files)}
    origin = {"project": "longmesh", "version": __version__, "commit": commit, "files": digests}
    return {**files, ORIGIN: (json.dumps(origin, indent=1) + "\n").encode()}


def renamed(source: bytes, path: Path, name: str = PACKAGE, namespace: str | None = None) -> bytes:
    """Rename our packages and operators in a source file; every other byte stays as it is.

    Packages become parts of ``name``, and operators' namespace ``namespace``, by default the same.

    Raises UserError: a relative import, or an ``import a.b`` without ``as``, whose name is used all
    over the file.
    """
    lines, namespace = source.splitlines(keepends=True), namespace or name
    edits: set[tuple[int, int, str, str]] = set()  # row, column in bytes, old text and new text
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            if node.level:
                where = f"{path}:{node.lineno} imports {module}, relative to its folder"
                raise UserError(f"{where}; give the module's full name")
            column = lines[node.lineno - 1].index(module.encode(), node.col_offset + len("from "))
            edits.add((node.lineno - 1, column, module, _moved(module, name)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if (moved := _moved(alias.name, name)) != alias.name and not alias.asname:
                    raise UserError(
                        f"{path}:{node.lineno} imports {alias.name} by its full name; use from ... import"
                    )
                edits.add((alias.lineno - 1, alias.col_offset, alias.name, moved))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) == f"torch.ops.{NAMESPACE}":
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            edits.add(
                (node.end_lineno - 1, node.end_col_offset - len(NAMESPACE), NAMESPACE, namespace)
            )
        elif isinstance(node, ast.Constant) and str(node.value).startswith(f"{NAMESPACE}::"):
            column = lines[node.lineno - 1].index(f"{NAMESPACE}::".encode(), node.col_offset)
            edits.add((node.lineno - 1, column, NAMESPACE, namespace))
    for row, column, old, new in sorted(edits, reverse=True):
        line = lines[row]
        lines[row] = line[:column] + new.encode() + line[column + len(old.encode()) :]
    return b"".join(lines)


def _moved(module: str, name: str) -> str:
    ours = OURS.match(module)
    return f"{name}.{PARTS[ours[0]]}{module[ours.end() :]}" if ours else module


def template(of: str, **values: str) -> str:
    """Return a file of the package or of its project, by ``of``, its name."""
    return (
        (TEMPLATES / f"{of}.in").read_text(encoding="utf-8").format(version=__version__, **values)
    )


def _check_imports(files: dict[str, bytes], ours: set[str], package: str = PACKAGE) -> None:
    """Raise UserError if a file imports something of ours that the package lacks."""
    modules = {
        f"{package}/{name}".removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for name in files
    }
    for name, content in files.items():
        for node in ast.walk(ast.parse(content)) if name.endswith(".py") else ():
            found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in (
                [node.module] if isinstance(node, ast.ImportFrom) and node.module else found
            ):
                if (top := module.split(".")[0]) in ours - {package} or (
                    top == package and module not in modules
                ):
                    raise UserError(
                        f"{name} of the package imports {module}, which is not in it; move what it needs"
                    )


def write(destination: Path, files: dict[str, bytes], name: str = PACKAGE) -> Path:
    """Write the package into a folder, whole or not at all; return its path.

    Raises UserError: the folder takes no files, or the target was not written by this command or
    was changed since; InUseError: another process writes there; OSError: a file cannot be written.
    """
    target = destination / name
    if why := unwritable(destination, "name another folder"):
        raise UserError(f"DEST is {destination}, {why}")
    with owned(destination, name):
        _check_target(target)
        draft, old = (destination / f".{name}.{uuid.uuid4().hex}" for _ in range(2))
        try:
            for inside, content in files.items():
                (draft / inside).parent.mkdir(parents=True, exist_ok=True)
                (draft / inside).write_bytes(content)
            for path in (*draft.rglob("*"), draft):
                fsync(path)
            # Nothing is between the two renames, so that a kill hardly leaves none of the two
            # packages.
            if target.exists():
                target.rename(old)
            draft.rename(target)
            fsync(destination)
        finally:
            if old.exists() and not target.exists():
                old.rename(target)
            for left in (draft, old):
                shutil.rmtree(left, ignore_errors=True)
    return target


def _check_target(target: Path) -> None:
    """Raise UserError unless the target is free, or holds this package as it was written."""
    fix = "move it away, or name another folder"
    if target.is_symlink():
        raise UserError(f"{target} is a symlink, which this command does not write; {fix}")
    if not target.exists():
        return
    try:
        files = json.loads((target / ORIGIN).read_text(encoding="utf-8"))["files"]
        kept = {str(name): str(digest) for name, digest in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(
            f"{target} was not written by this command (no valid {ORIGIN} in it); {fix}"
        ) from None
    kept |= {
        parent.as_posix(): "folder" for name in kept for parent in Path(name).parents if parent.name
    }
    kept[ORIGIN] = sha256(target / ORIGIN)
    found = {}
    for path in target.rglob("*"):
        if path.is_symlink():
            kind = "link"
        elif "__pycache__" in path.relative_to(target).parts:
            continue
        else:
            kind = sha256(path) if path.is_file() else "folder" if path.is_dir() else "device"
        found[path.relative_to(target).as_posix()] = kind
    for name in sorted(found.keys() | kept.keys()):
        if found.get(name) != kept.get(name):
            how = "added" if name not in kept else "removed" if name not in found else "changed"
            raise UserError(f"{target / name} was {how} since; {fix}")


def _name(text: str) -> str:
    """Return a package's name. Raises UserError: no module can have it, or one of Python's or ours
    has.
    """
    ours = {path.parent.name for path in ROOT.glob("*/*.py")} | {"transformers", "torch", "numpy"}
    if not text.isidentifier() or iskeyword(text) or text in sys.stdlib_module_names | ours:
        raise UserError(
            f"--package is {text!r}; give a name that an import can have and no other module has"
        )
    return text


def project(name: str, package: dict[str, bytes], commit: str) -> dict[str, bytes]:
    """Return the files of a project around the package by relative path, with its tests."""
    files = {f"src/{name}/{path}": content for path, content in package.items()}
    files |= {
        made: template(made, name=name, commit=commit).encode()
        for made in ("pyproject.toml", "README.md")
    }
    files["LICENSE"] = package["LICENSE"]
    for path in TESTS:
        files[f"tests/{path}"] = renamed(
            (ROOT / "tests" / path).read_bytes(), Path("tests", path), name
        )
    folders = {parent for path in TESTS for parent in Path("tests", path).parents if parent.name}
    return files | {f"{folder.as_posix()}/__init__.py": b"" for folder in folders}


def wheel(destination: Path, files: dict[str, bytes]) -> Path:
    """Build the project's wheel into a folder, with this environment's setuptools; return its path.

    Raises UserError: it cannot be built; the message quotes pip's last lines.
    """
    with tempfile.TemporaryDirectory() as folder:
        for path, content in files.items():
            (Path(folder, "project") / path).parent.mkdir(parents=True, exist_ok=True)
            (Path(folder, "project") / path).write_bytes(content)
        command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            folder,
        ]
        done = subprocess.run(
            [*command, f"{folder}/project"], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(
                "the wheel could not be built; install pip and setuptools 77 or later here, or leave --package out: "
                f"{' '.join(done.stderr.split()[-60:])}"
            )
        (built,) = Path(folder).glob("*.whl")
        target = destination / built.name
        target.write_bytes(built.read_bytes())
    return target


@one_line_errors
def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = parser_for("python -m tools.vendor", __doc__)
    where = f"folder that gets {PACKAGE}/, such as a project"
    parser.add_argument("destination", type=Path, metavar="DEST", help=where)
    wheels = "write a project NAME/ with pyproject.toml and tests, and its wheel, whose only module is NAME"
    parser.add_argument("--package", metavar="NAME", help=wheels)
    args = parser.parse_args(argv)
    name = PACKAGE if args.package is None else _name(args.package)
    before = commit_of()
    files = package(name)
    origin = json.loads(files[ORIGIN])
    if args.package is not None:
        files = with_origin(project(name, files, origin["commit"]), origin["commit"])
    target = write(args.destination, files, name)
    print(
        f"wrote {target}: {len(files)} files of longmesh {origin['version']}, commit {origin['commit']}"
    )
    if args.package is not None:
        built = wheel(args.destination, files)
        print(f"built {built}: {built.stat().st_size / 1000:.0f} KB; pip install {built}")
    if before != commit_of():
        print(
            f"note: {args.destination} lies in this checkout, where git sees it: figures made from now on are called "
            '"with changes"; move it, or write it to runs/ or outside'
        )


if __name__ == "__main__":
    run_command(main)
