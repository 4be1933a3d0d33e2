"""Completes pyproject.toml: the C extension, one wheel for CPython 3.11 and every later version, and an sdist with the
folders and links of a checkout, so that tests run in it."""

import os
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class SourceDistribution(sdist):
    """Stores each room once, at the top, and the links to it below src/penstock, which sdist follows."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        for link in (link for link in Path("src/penstock").iterdir() if link.is_symlink()):
            copy = Path(base_dir, link)
            shutil.move(copy, Path(base_dir, link.name))
            copy.symlink_to(os.readlink(link))


# An editable install (`make serve`) leaves the extension to `csrc/build.py`, which make runs beside pip, on all cores.
is_editable = "editable_wheel" in sys.argv
commands = {} if is_editable else {"build_ext": runpy.run_path("csrc/build.py")["BuildOnAllCores"]}
setup(
    cffi_modules=[] if is_editable else ["csrc/build.py:ffibuilder"],
    cmdclass={"sdist": SourceDistribution, **commands},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
