"""``python -m headwise``: the same command line as ``headwise``."""

from __future__ import annotations

from headwise.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
