"""Generated pages of docs/: written from the code that they describe, and checked for freshness.

python tools/generate_docs.py            write them
python tools/generate_docs.py --check    exit 1 where one is not what would be written
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("COLUMNS", "100")
DOCS = Path(__file__).resolve().parents[1] / "docs"


def command_line() -> str:
    """The help of every verb, as the command prints it."""
    import click

    from headwise.cli.app import VERBS, app

    parts = ["# The command line\n\nGenerated from the commands' own help by `make docs`.\n"]
    context = click.Context(app, info_name="headwise", max_content_width=100, terminal_width=100)
    parts.append(f"```\n{app.get_help(context)}\n```\n")
    for verb in VERBS:
        command = app.get_command(context, verb)
        assert command is not None
        inner = click.Context(command, info_name=verb, parent=context, max_content_width=100, terminal_width=100)
        parts.append(f"## headwise {verb}\n\n```\n{command.get_help(inner)}\n```\n")
    return "\n".join(parts)


def measures() -> str:
    """Every measure: name, unit, range, source."""
    from headwise.measures import reference_page

    return reference_page()


PAGES: dict[str, Callable[[], str]] = {
    "reference/command-line.md": command_line,
    "reference/measures.md": measures,
}


def main() -> int:
    """Write the pages, or with ``--check`` compare them."""
    check, stale = "--check" in sys.argv[1:], []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if check:
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    if stale:
        print(f"stale: {', '.join(stale)}; run make docs", file=sys.stderr)
    return bool(stale)


if __name__ == "__main__":
    raise SystemExit(main())
