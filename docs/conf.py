"""The documentation site: `make docs` builds it into `docs/_build/html`.

Nothing here uses the network or JAX's devices: pictures are drawn from schedules, and
code is executed by tests, not by Sphinx.
"""

import importlib.metadata
import os
import pathlib
import runpy
import sys

DOCS = pathlib.Path(__file__).parent
# Importing jaxdp starts no backend. With a platform that does not exist, whatever
# would start one while the site is built fails, instead of taking somebody's GPU.
os.environ["JAX_PLATFORMS"] = "none"
sys.path.insert(0, str(DOCS / "_ext"))
# Where plugins for GPUs are installed and no driver is, importing JAX writes six lines.
quiet = runpy.run_path(str(DOCS.parent / "jaxdp" / "targets" / "quiet.py"))
with quiet.pop("quietly")():
    import jaxdp  # noqa: F401
del quiet  # Sphinx keeps what is left of this module, and functions do not keep

project = "jaxdp"
author = "the jaxdp authors"
version = release = importlib.metadata.version("jax-data-parallel")
html_title = f"jaxdp {version}"

extensions = [
    "bars",
    "docstrings",
    "ledger",
    "myst_nb",
    "pictures",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
# Two classes are called DataParallel: the port, and what `jaxdp.data_parallel` returns.
suppress_warnings = ["ref.python"]
exclude_patterns = ["_build", "examples", "**/*.ipynb"]
source_suffix = {".md": "myst-nb"}

nb_execution_mode = "off"
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3

default_role = "name"
highlight_language = "none"
toc_object_entries_show_parents = "hide"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
maximum_signature_line_length = 80
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_display_short_literal_types = True
add_module_names = False

html_context = {"default_mode": "auto"}  # light or dark, as the reader's system is
html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "home_page_in_toc": False,
    "navbar_persistent": [],
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
