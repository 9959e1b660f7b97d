"""Sphinx configuration."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import scbd

DOCS = Path(__file__).parent
PACKAGE = Path(scbd.__file__).parent

_about = metadata("scbd")
project = "scbd"
author = "The scbd developers"
copyright = f"2026, {author}"
release = version = _about["Version"]


def repository() -> str | None:
    """Where the source is, if the metadata of the package name a place that is not a placeholder."""
    urls = dict(entry.split(", ", 1) for entry in _about.get_all("Project-URL", []))
    url = urls.get("Source", "").rstrip("/")
    return url if url.startswith("https://") and not re.search(r"[<>]|example|OWNER|your-", url) else None


SOURCE = repository()

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinxcontrib.bibtex",
]
exclude_patterns = ["_build", "**.ipynb_checkpoints"]
# autosummary writes .rst files; without this entry, API pages would show directives as text
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb", ".ipynb": "myst-nb"}
templates_path = ["_templates"]
nitpicky = True
# Internal classes that occur in signatures, but are not constructed by users and therefore have no page
nitpick_ignore = [
    ("py:class", name)
    for name in (
        "AlphaSelection",
        "EnvironmentScaling",
        "ImageSource",
        "InputKind",
        "Objective",
        "OnlineHead",
        "PreparedInputs",
        "ReferenceBatches",
        "RemovableHandle",
        "TrainingSample",
        "scbd.data._loading.BatchLoader",
        "scbd.data._sources.InputKind",
        "scbd.model._interfaces.EmbeddingNetwork",
        "scbd.model._interfaces.ReferenceBatches",
        "scbd.nn._environment_scaling.EnvironmentScaling",
        "scbd.model._interfaces.TrainingSample",
        "scbd.nn._explained_variance.ExplainedVariance",
    )
]

bibtex_bibfiles = ["references.bib"]

html_math_renderer = "mathml"  # see mathml() below
myst_update_mathjax = False

html_theme = "sphinx_book_theme"
html_title = f"scbd {release}"  # shows the version of the documentation
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["scbd.css"]
html_show_sphinx = False
html_context = {"default_mode": "auto"}  # light or dark as in the browser; without this entry, the theme logs an error
html_theme_options: dict[str, Any] = {
    "logo": {"text": f"scbd {release}", "alt_text": "scbd"},
    "navbar_persistent": [],  # only one search field, in the sidebar
    "use_download_button": False,
    "extra_footer": "BSD-3-Clause licence",
    "show_toc_level": 2,
    "max_navbar_depth": 3,  # down to classes; the page of a class links to its methods
}
if SOURCE:
    html_theme_options |= {
        "repository_url": SOURCE,
        "repository_branch": "main",
        "path_to_docs": "docs",
        "use_repository_button": True,
        "use_edit_page_button": True,
        "use_issues_button": True,
    }

autosummary_generate = True
autodoc_typehints = "signature"
autodoc_preserve_defaults = True  # shows 2 / 3 instead of 0.6666666666666666
python_display_short_literal_types = True  # shows "c" | "s"
toc_object_entries_show_parents = "hide"  # shows train() instead of SCBDModel.train(), as the sidebar is narrow
python_maximum_signature_line_length = 72  # longer signatures get one parameter per line
napoleon_google_docstring = False
# "Returns" is written in sentences, not as a type with a description
napoleon_custom_sections = [("Warns", "Raises"), "Returns"]
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"
suppress_warnings = ["mystnb.unknown_mime_type"]

# Links to other projects. The inventories of the projects are tried first. docs/inventories contains the names that we
# link to, in plain text, for builds without internet and for names that the inventory of a project lacks. For a new
# link, add a line to docs/inventories: name, kind and page.
_PROJECTS = {
    "anndata": "https://anndata.readthedocs.io/en/stable/",
    "h5py": "https://docs.h5py.org/en/stable/",
    "lightning": "https://lightning.ai/docs/pytorch/stable/",
    "matplotlib": "https://matplotlib.org/stable/",
    "numpy": "https://numpy.org/doc/stable/",
    "pandas": "https://pandas.pydata.org/docs/",
    "python": "https://docs.python.org/3/",
    "scanpy": "https://scanpy.readthedocs.io/en/stable/",
    "scipy": "https://docs.scipy.org/doc/scipy/",
    "scvi": "https://docs.scvi-tools.org/en/stable/",
    "sklearn": "https://scikit-learn.org/stable/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "zarr": "https://zarr.readthedocs.io/en/stable/",
}
intersphinx_mapping = {name: (url, (None, f"inventories/{name}.inv")) for name, url in _PROJECTS.items()}
intersphinx_timeout = 5

# Short names in annotations and docstrings, with the full names
_KNOWN_AS = {
    "AnnData": "anndata.AnnData",
    "Any": "typing.Any",
    "ArrayLike": "numpy.typing.ArrayLike",
    "Axes": "matplotlib.axes.Axes",
    "BatchSampler": "torch.utils.data.BatchSampler",
    "Callable": "collections.abc.Callable",
    "Callback": "lightning.pytorch.callbacks.Callback",
    "DataLoader": "torch.utils.data.DataLoader",
    "Figure": "matplotlib.figure.Figure",
    "Iterable": "collections.abc.Iterable",
    "Iterator": "collections.abc.Iterator",
    "L.LightningDataModule": "lightning.pytorch.core.LightningDataModule",
    "L.LightningModule": "lightning.pytorch.core.LightningModule",
    "L.Trainer": "lightning.pytorch.trainer.trainer.Trainer",
    "Literal": "typing.Literal",
    "Mapping": "collections.abc.Mapping",
    "Path": "pathlib.Path",
    "Sampler": "torch.utils.data.Sampler",
    "Sequence": "collections.abc.Sequence",
    "Store": "zarr.abc.store.Store",
    "Styler": "pandas.io.formats.style.Styler",
    "Tensor": "torch.Tensor",
    "anndata._core.anndata.AnnData": "anndata.AnnData",
    "lightning.pytorch.callbacks.callback.Callback": "lightning.pytorch.callbacks.Callback",
    "lightning.pytorch.Trainer": "lightning.pytorch.trainer.trainer.Trainer",
    "nn.Module": "torch.nn.Module",
    "pandas.core.frame.DataFrame": "pandas.DataFrame",
    "pandas.core.series.Series": "pandas.Series",
    "torch._C.Generator": "torch.Generator",
    "torch.nn.modules.module.Module": "torch.nn.Module",
    "torch.optim.optimizer.Optimizer": "torch.optim.Optimizer",
}
_SHORT = {"np.": "numpy.", "pd.": "pandas."}


def aliases() -> dict[str, str]:
    """What names of types stand for, as the source writes it: ImageSize, int | tuple[int, int]."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.AnnAssign(
                    target=ast.Name(id=name), annotation=ast.Name(id="TypeAlias"), value=ast.expr() as value
                ):
                    found[name] = value
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Subscript() | ast.BinOp() as value) if (
                    not name.startswith("_") and name[0].isupper() and not name.isupper()
                ):
                    found[name] = value
    return {
        name: value.value if isinstance(value, ast.Constant) else ast.unparse(value) for name, value in found.items()
    }


_ALIASES = aliases()


def spelled_out(app, what, name, obj, options, signature, returned):
    """Signatures with types that a reader can use."""
    pattern = re.compile(rf"(?<![\w.'\"])({'|'.join(sorted(_ALIASES))})(?![\w.'\"])")

    def expand(text: str | None) -> str | None:
        text = text and text.replace("<factory>", "...")  # placeholder of default values of dataclasses
        for _ in range(3):  # aliases may contain aliases
            text = text and pattern.sub(lambda match: _ALIASES[match[1]], text)
        return text

    return expand(signature), expand(returned)


def full_name(app, env, node, contnode):
    """Link short names: of other projects through intersphinx, of our own to the class that is documented."""
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    if target.startswith(("'", '"')):
        return contnode  # a literal value, not a type
    for short, full in _SHORT.items():
        if target.startswith(short):
            target = full + target.removeprefix(short)
    target = _KNOWN_AS.get(target, target)
    domain = env.domains["py"]
    # methods in the table of members, which is outside of the class, or methods that a model shares with SCBDModel
    for owner in (Path(node["refdoc"]).name, "scbd.SCBDModel"):
        if node["reftype"] == "meth" and f"{owner}.{target}" in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, "meth", f"{owner}.{target}", node, contnode)
    node["reftarget"] = target
    if node["reftype"] == "class":
        node["reftype"] = "obj"  # the other project may document the class as data or as a function
    ours = [known for known in domain.objects if known.split(".")[-1] == target.split(".")[-1]]
    ours = [known for known in ours if known == target or "." not in target or target.startswith("scbd.")]
    classes = [known for known in ours if domain.objects[known].objtype in ("class", "exception", "function")]
    if len(set(classes)) == 1:
        node["reftarget"] = classes[0]
        node["reftype"] = "obj"
        return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", classes[0], node, contnode)
    return None


def add_known(app):
    """Names of docs/inventories that a project's own inventory lacks."""
    from sphinx.ext.intersphinx import InventoryAdapter
    from sphinx.util.inventory import InventoryFile

    inventory = InventoryAdapter(app.env).main_inventory
    for name, url in _PROJECTS.items():
        content = (DOCS / "inventories" / f"{name}.inv").read_bytes()
        for kind, entries in InventoryFile.loads(content, uri=url).data.items():
            for entry, item in entries.items():
                inventory.setdefault(kind, {}).setdefault(entry, item)


# Members of models by task, in the order of an analysis and of the pages of models. Add each new member here, since the
# build stops if a member is missing.
TASKS = {
    "Set up and train": ["setup_anndata", "train"],
    "Embed": ["get_latent_representation", "embed_to"],
    "Predict perturbations": ["predict", "can_predict"],
    "Decode and look": ["train_decoder", "reconstruct", "swap_blocks", "traverse", "decode", "get_intensities"],
    "Save and load": ["save", "load", "minify_adata"],
    "Inspect": ["health", "latent_health", "adata", "get_var_names", "view_anndata_setup"],
    "Cells of the training": ["train_indices", "validation_indices", "test_indices"],
}
# Members of the base class of scvi-tools that our pages link to
FROM_SCVI = ["history", "is_trained", "device", "to_device"]


def by_task(members: list[str]) -> dict[str, list[str]]:
    """Members of a model by what they are for."""
    placed = {task: [name for name in names if name in members] for task, names in TASKS.items()}
    if missing := set(members) - {name for names in placed.values() for name in names}:
        msg = f"TASKS in docs/conf.py does not say what these members of models are for: {sorted(missing)}"
        raise ValueError(msg)
    return {task: names for task, names in placed.items() if names}


def own_members(fullname: str) -> dict[str, Any]:
    """Attributes and methods of a class that its page documents: ours, public, with words of their own.

    Those that are the same as of SCBDModel are also in ``shared``: each has a page of its own, with SCBDModel. Of
    models, all are also in ``tasks``, and ``lead`` is what the class says first.
    """
    module, _, name = fullname.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    found: dict[str, list[str]] = {"attributes": [], "methods": []}
    for parent in cls.__mro__:
        if not parent.__module__.startswith("scbd"):
            continue
        for member, value in vars(parent).items():
            if member.startswith("_") or not hasattr(cls, member) or not getattr(cls, member).__doc__:
                continue
            value = getattr(value, "__func__", value)
            kind = "methods" if inspect.isroutine(value) else "attributes" if isinstance(value, property) else None
            if kind and member not in found[kind]:
                found[kind].append(member)
    everything = found["attributes"] + found["methods"]
    # document methods that nine models share with SCBDModel, such as train(), only once
    shared = [
        member
        for member in everything
        if cls is not scbd.SCBDModel
        and inspect.getattr_static(cls, member) is inspect.getattr_static(scbd.SCBDModel, member, None)
    ]
    tasks = by_task(everything) if issubclass(cls, scbd.model.ImageModel) else {}
    lead = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    return {kind: sorted(members) for kind, members in found.items()} | {"shared": shared, "tasks": tasks, "lead": lead}


def for_templates(app):
    """Functions for templates of autosummary, while it writes pages: a configuration that holds some is not cached."""
    known = {"own_members": own_members, "tasks": TASKS, "from_scvi": FROM_SCVI}
    app.config.autosummary_context = {} if app.config.autosummary_context else known


def mathml(writer, node):
    """Formulas as MathML, which browsers draw themselves: no script, no fonts, no other host."""
    from docutils.nodes import SkipNode, math_block
    from docutils.utils.math import MathError
    from docutils.utils.math.latex2mathml import tex2mathml
    from sphinx.util import logging

    block = isinstance(node, math_block)
    try:
        formula = str(tex2mathml(node.astext(), as_block=block))
    except MathError as error:  # for example \\big, which must be \\bigl or \\bigr
        logging.getLogger(__name__).warning("Formula: %s", error, location=node)
        formula = ""
    writer.body.append(f'<div class="math">{formula}</div>' if block else formula)
    raise SkipNode


def mark_long(app, doctree):
    """Mark code in the text of which a word may not fit the line of a phone: scbd.css lets it break."""
    from docutils.nodes import literal

    for node in doctree.findall(literal):
        if max(map(len, node.astext().split()), default=0) > 30:
            node["classes"].append("long")


def setup(app):
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("builder-inited", for_templates, priority=100)
    app.connect("builder-inited", for_templates, priority=800)  # autosummary writes its pages in between
    app.connect("autodoc-process-signature", spelled_out)
    app.connect("builder-inited", add_known, priority=900)  # after intersphinx
    app.connect("missing-reference", full_name, priority=400)  # before intersphinx
    app.connect("doctree-read", mark_long)
