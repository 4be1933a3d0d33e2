"""What pyproject.toml cannot say: the C extension, and that one wheel serves CPython 3.11 and every later version."""

from setuptools import setup

setup(cffi_modules=["csrc/build.py:ffibuilder"], options={"bdist_wheel": {"py_limited_api": "cp311"}})
