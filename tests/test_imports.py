"""Imports go one way: a file imports from its own layer or from a lower one."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "lowtide"
LAYERS = (
    ("errors", "_version", "garbage"),
    ("records", "sizes", "snapshot", "optim", "threads", "background"),
    ("registry", "ledger"),
    ("coding", "bounds", "statistics"),
    ("codecs", "stores", "controllers"),
    ("policies", "methods", "capture", "witness", "kernels"),
    ("sites", "recompute", "surroundings"),
    ("payloads", "graphs", "ambient", "gates"),
    ("pipeline", "joint", "restoring"),
    ("compiled",),
    ("reports",),
    ("session", "growth"),
    ("planner",),
    ("app", "integrations"),
    ("__main__",),
)
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _files() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _part(module: str) -> str:
    """``lowtide.codecs.sz`` -> ``codecs``."""
    return module.split(".")[1]


def _imports(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Line and full name of everything of Lowtide's that a file imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            # ``from lowtide import methods`` names a module, ``from lowtide.errors import X`` is one already
            names = [f"{base}.{alias.name}" for alias in node.names] if base == "lowtide" else [base]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "lowtide")


def _edges(path: Path) -> Iterator[tuple[str, int, str]]:
    """From, line, to: the parts that a file joins."""
    relative = path.relative_to(PACKAGE.parent).with_suffix("")
    module = ".".join(relative.parts)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for line, target in _imports(tree, module):
        yield _part(module), line, target


@pytest.mark.parametrize("path", _files(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_go_one_way(path):
    for source, line, target in _edges(path):
        where = f"{path.relative_to(PACKAGE).as_posix()}:{line}"
        assert "." in target, f"{where} imports the whole of {target}, which imports everything"
        part = _part(target)
        assert part in RANK, f"{where} imports {target}, which has no layer: name it in this test"
        assert RANK[part] <= RANK[source], f"{where}: {source} (layer {RANK[source]}) imports {part} ({RANK[part]})"


def test_every_part_has_a_layer():
    parts = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in _files()}
    assert parts <= set(RANK), f"no layer for {sorted(parts - set(RANK))}"


def test_parts_of_a_layer_do_not_import_each_other_in_a_circle():
    """Within a layer an order is free, but there has to be one."""
    edges = {(source, _part(target)) for path in _files() for source, _, target in _edges(path)}
    waiting = {source: {b for a, b in edges if a == source and b != source} for source in RANK}
    while waiting:
        ready = [part for part, needs in waiting.items() if not needs & waiting.keys()]
        assert ready, f"a circle among {sorted(waiting)}"
        for part in ready:
            del waiting[part]


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import lowtide.session", ["lowtide.session"]),
        ("from lowtide import methods, ledger", ["lowtide.methods", "lowtide.ledger"]),
        ("from lowtide.errors import BoundError", ["lowtide.errors"]),
        ("def f():\n    from lowtide.app.zoo import build", ["lowtide.app.zoo"]),
        ("from . import sz", ["lowtide.codecs"]),
        ("from ..session import attach", ["lowtide.session"]),
        ("import lowtide", ["lowtide"]),
        ("import torch", []),
    ],
)
def test_the_reader_of_imports_reads_them(code, found):
    assert [name for _, name in _imports(ast.parse(code), "lowtide.codecs.shape")] == found
