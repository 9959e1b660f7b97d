"""Sphinx configuration."""

from importlib.metadata import version as _version

project = "scbd"
author = "The scbd developers"
copyright = f"2026, {author}"
release = version = _version("scbd")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxcontrib.bibtex",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints", "results"]  # tables that pages include
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}

bibtex_bibfiles = ["references.bib"]

html_theme = "sphinx_book_theme"
html_title = "scbd"

autosummary_generate = True
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_custom_sections = [("Warns", "Raises")]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]
