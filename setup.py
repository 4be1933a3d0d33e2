"""What pyproject.toml cannot say: the C extension, and that one wheel serves CPython 3.11 and every later version."""

import runpy
import sys

from setuptools import setup

# An editable install (`make serve`) leaves the extension to `csrc/build.py`, which make runs beside pip, on all cores.
is_editable = "editable_wheel" in sys.argv
setup(
    cffi_modules=[] if is_editable else ["csrc/build.py:ffibuilder"],
    cmdclass={} if is_editable else {"build_ext": runpy.run_path("csrc/build.py")["BuildOnAllCores"]},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
