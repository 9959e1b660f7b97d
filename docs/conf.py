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
# .rst is what autosummary writes: without it, pages of the API hold its directives as text
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
templates_path = ["_templates"]

bibtex_bibfiles = ["references.bib"]

html_theme = "sphinx_book_theme"
html_title = f"scbd {release}"  # which of the versions this is
html_theme_options = {"navbar_persistent": []}  # one search field, that of the sidebar

autosummary_generate = True
autodoc_typehints = "none"
autodoc_preserve_defaults = True  # 2 / 3, not 0.6666666666666666
napoleon_google_docstring = False
# what is returned is said in sentences, not as a type and a description
napoleon_custom_sections = [("Warns", "Raises"), "Returns"]
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]
