"""A test of the wheel that was built from the sdist, run by `make check` against the installed copy.

Usage: smoke_installed.py FOLDER, which holds the sdist, the wheel and `site`, where the wheel was installed and
which is first on the path. It must find nothing of the source tree.
"""

import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    import penstock
    from penstock import _csrc
    from penstock.cache.keys import block_keys

    for path in (penstock.__file__ or "", _csrc.__file__):
        assert Path(path).is_relative_to(folder / "site"), f"{path} is not the installed copy"
    (key,) = block_keys(list(range(16)), 16)
    assert key.hex() == "d4a2ea9e2c44d0b658cede080b1af81eed45de2164509435c4359eb4fd2dcc3a"
    from penstock.engine.page.document import document

    assert bytes(document().body).startswith(b"<!doctype html>")  # all their files are there
    from penstock.prove.own.server import WORLDS

    assert "tiers" in WORLDS
    assert "torch" not in sys.modules

    [wheel], [sdist] = folder.glob("*.whl"), folder.glob("*.tar.gz")
    assert "-cp311-abi3-" in wheel.name, wheel.name
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = [name for name in archive.namelist() if name.endswith(".py")]
    with tarfile.open(sdist) as archive:
        stored = [name.partition("/")[2] for name in archive.getnames() if name.endswith(".py")]
    # A room is a folder at the top and a link below src/penstock, as in a checkout, and the tests are stored as well.
    rooms = {link.name for link in Path("src/penstock").iterdir() if link.is_symlink()}
    in_sdist = [f"penstock/{name}" for name in stored if name.partition("/")[0] in rooms]
    in_sdist += [name.removeprefix("src/") for name in stored if name.startswith("src/")]
    assert {"tests/size.py", "tests/test_layers.py"} <= set(stored)
    in_tree = [str(path.relative_to("src")) for path in sources(Path("src/penstock"))]
    for where, names in ("wheel", in_wheel), ("sdist", in_sdist):
        assert Counter(names) == Counter(in_tree), f"{where} and tree differ: {set(names) ^ set(in_tree)}"
    print(f"{wheel.name}: {len(in_wheel)} modules, each once; imports and hashes without the source tree")


def sources(package: Path) -> list[Path]:
    """Every module, through the symlinks (rglob does not follow them in every version of Python)."""
    found = list(package.glob("*.py"))
    for room in package.iterdir():
        if room.is_dir() and room.name != "__pycache__":
            found += room.rglob("*.py")
    return found


if __name__ == "__main__":
    main()
