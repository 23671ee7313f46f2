"""Sphinx's configuration: `make docs` writes the site to docs/_build."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

project = "coop_jax"
author = "The coop_jax developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "coop_jax"
html_show_copyright = False
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "exclude-members": "from_fields, fields"}
napoleon_google_docstring = True
napoleon_use_ivar = True
default_role = "code"
