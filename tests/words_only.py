"""Check that a change touches only words: the code without docstrings and comments is the same as before.

    python tests/words_only.py BASE [FILE ...]             docstrings and comments may differ
    python tests/words_only.py BASE --texts [FILE ...]     texts with a blank, such as messages, may differ as well

BASE is a commit. Without FILE, every Python file of the package is compared. Exits with 1 if code differs.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


class _WithoutWords(ast.NodeTransformer):
    """Remove statements that are only a text, which includes docstrings, and optionally empty texts with a blank."""

    def __init__(self, *, keep_texts: bool) -> None:
        self.keep_texts = keep_texts

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            return None
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if not self.keep_texts and isinstance(node.value, str) and " " in node.value:
            return ast.Constant(" ")
        return node


def code_of(source: str, *, keep_texts: bool = True) -> str:
    """Return a text that is equal for two sources if they differ only in words."""
    return ast.dump(_WithoutWords(keep_texts=keep_texts).visit(ast.parse(source)))


def main(arguments: list[str]) -> int:
    base, *rest = arguments
    keep_texts = "--texts" not in rest
    files = [Path(name).resolve() for name in rest if not name.startswith("--")]
    changed = []
    for path in files or sorted((ROOT / "src").rglob("*.py")):
        name = path.relative_to(ROOT)
        before = subprocess.run(["git", "show", f"{base}:{name}"], capture_output=True, text=True, cwd=ROOT)
        if before.returncode or code_of(before.stdout, keep_texts=keep_texts) != code_of(
            path.read_text(encoding="utf-8"), keep_texts=keep_texts
        ):
            changed.append(str(name))
    print(*(f"{name}: the code differs from {base}" for name in changed), sep="\n")
    return int(bool(changed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
