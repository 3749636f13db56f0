"""How the manual is built: `sphinx-build -W --keep-going docs build/manual`.

Warnings are errors; nothing is fetched.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import pictures  # noqa: E402

import monet_like  # noqa: E402

project = "monet_like"
version = release = monet_like.__version__
copyright = "the authors of monet_like"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
exclude_patterns = ["_pictures"]
html_theme = "furo"
html_title = f"monet_like {release}"
html_copy_source = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

smartquotes = False  # they make one dash of an option's two
default_role = "py:obj"  # docstrings name things in single backquotes
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_use_ivar = True  # else a dataclass's fields are described twice

pictures.draw_all(HERE / "_pictures")

# The benchmarks' tables and the zoo's lie outside this folder, where links must find them in a checkout; here they are
# pages too.
RESULTS = "../benchmarks/results"
shutil.rmtree(HERE / "_results", ignore_errors=True)
shutil.copytree(HERE / RESULTS, HERE / "_results")
zoo = re.sub(r"\[([^\]]+\.json)\]\([^)]*\)", r"`\1`", (HERE / "../solutions/README.md").read_text())
(HERE / "_zoo.md").write_text(zoo.replace("](../docs/", "]("))


def setup(app: Any) -> None:
    """Links to the benchmarks' and the zoo's tables lead to these pages, each of which has a title."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = source[0].replace(f"]({RESULTS}/", "](_results/").replace("](../solutions/README.md)", "](_zoo.md)")
        if name.startswith("_results/") and not source[0].lstrip().startswith("# "):
            source[0] = f"# {Path(name).name}\n\n{source[0]}"

    app.connect("source-read", read)
