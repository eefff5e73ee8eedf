"""The page: template, styles, scripts and data put into one file."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any, Final

from headwise import artifacts
from headwise.errors import RunError
from headwise.heads import HeadTable
from headwise.reports._facts import facts
from headwise.reports._numbers import page_data

_SCRIPTS: Final = ("data", "tip", "maps", "spread", "card", "rows", "main")
"""The page's own scripts, in the order in which they are put together."""


def write_report(run_folder: str | Path) -> Path:
    """Write ``report.html`` into a run folder, from the files that are in it.

    Returns:
        The path of the page. One that is there is replaced in one step.

    Raises:
        RunError: the folder is not a finished run, or the page cannot be written.
    """
    run = artifacts.read_run(run_folder)
    page = render_report(run.run, HeadTable.from_document(run.heads))
    return artifacts.replace_file(run.folder / artifacts.REPORT_FILE, page.encode("utf-8", "backslashreplace"))


def render_report(run: dict[str, Any], table: HeadTable) -> str:
    """The page for the facts of a run (as in ``run.json``) and its table."""
    import jinja2

    if not len(table):
        raise RunError("the table has no heads; there is nothing to report")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("headwise.reports", "page"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    vendor = _read("vendor", "charts.min.js")
    own = "\n".join(_read("page", f"{name}.js") for name in _SCRIPTS)
    scripts = [_script(vendor), _script(f'"use strict";\n(() => {{\n{own}\n}})();')]
    return environment.get_template("page.html.j2").render(
        facts=facts(run, table),
        policy=_policy(scripts),
        scripts=[_markup(script) for script in scripts],
        style=_markup(_read("page", "page.css")),
        data=_markup(_inert(page_data(table))),
        licences=_read("vendor", "LICENSES.txt"),
        version=run["versions"]["headwise"],
        has_special=any(table.count(name, "special").any() for name in table.measures),
    )


def _read(folder: str, name: str) -> str:
    return resources.files("headwise.reports").joinpath(folder, name).read_text("utf-8")


def _script(text: str) -> str:
    """A script as it may stand between script tags."""
    lowered = text.lower()
    if "</script" in lowered or "<!--" in lowered:
        raise RunError("a script of the report would end its own tag; this is a defect of headwise")
    return text


def _policy(scripts: list[str]) -> str:
    """Nothing is fetched, and only these scripts run, whatever text the page holds."""
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _inert(data: dict[str, Any]) -> str:
    """JSON that stays inside its script tag, whatever names it holds."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _markup(text: str) -> Any:
    from markupsafe import Markup

    return Markup(text)  # our own file, or JSON without < > &
