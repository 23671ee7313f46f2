"""`python -m coop_jax` is the command line."""

from __future__ import annotations

import sys

from coop_cli import main

sys.exit(main())
