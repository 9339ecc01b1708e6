"""`python -m moe_serve ...` is `moe-serve ...`."""

from __future__ import annotations

import sys

from moe_serve.cli import main

if __name__ == "__main__":
    sys.exit(main())
