"""asv's pages, made to load no script from the network.

What asv publishes asks other people's servers for its scripts. They are fetched once from npm, at
asv's own versions and held to their hashes, and the pages are pointed at the copies. Where npm is
missing the pages stay as they are.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
COPIES = HERE / "vendor"
FOLDER = "vendor"

#: Instead of a plugin that npm does not have.
TABLE_SORT = HERE / "pages" / "tablesort.js"


@dataclass(frozen=True)
class Script:
    """A file of an npm package. url: what is in the address that asv's page gives."""

    url: str
    package: str
    path: str
    sha256: str

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


SCRIPTS = (
    Script(
        "jquery-3.3.1.min.js",
        "jquery@3.3.1",
        "dist/jquery.min.js",
        "160a426ff2894252cd7cebbdd6d6b7da8fcd319c65b70468f10b6690c45d02ef",
    ),
    Script(
        "/flot/0.8.3/jquery.flot.min.js",
        "flot@0.8.3",
        "jquery.flot.js",
        "b7b931f273c38b1277b9c6c1f4e05c4ec09885a487bddaf3279e2d7e49a38e12",
    ),
    Script(
        "/flot/0.8.3/jquery.flot.time.min.js",
        "flot@0.8.3",
        "jquery.flot.time.js",
        "a582c832adc7138a6b05aaf61f16ebac274701f1be4afea77e739a1c34b9c41a",
    ),
    Script(
        "/flot/0.8.3/jquery.flot.selection.min.js",
        "flot@0.8.3",
        "jquery.flot.selection.js",
        "e6c85f6c1ebe4b4da29d8ae238c7c5060283f05f7ef054f6b91817d02c092918",
    ),
    Script(
        "/flot/0.8.3/jquery.flot.categories.min.js",
        "flot@0.8.3",
        "jquery.flot.categories.js",
        "6e81664b28ea795c734906f4aa15614640a75ac7fbd399a7fb9084040698351a",
    ),
    Script(
        "flot-orderbars@1.0.0",
        "flot-orderbars@1.0.0",
        "js/jquery.flot.orderBars.js",
        "39735b4f46f96ff4e082572401f47c55a2767b366fd1d1e821e44a8d830a12bf",
    ),
    Script(
        "/blueimp-md5/2.19.0/",
        "blueimp-md5@2.19.0",
        "js/md5.min.js",
        "64d7ded388c562e4bde9e58ce205e5fa01b9734fcd434d496eb7b4fbfe9b927d",
    ),
    Script(
        "bootstrap@3.1.1/dist/js/",
        "bootstrap@3.1.1",
        "dist/js/bootstrap.min.js",
        "898d05a17f2cfc5120ddcdba47a885c378c0b466f30f0700e502757e24b403a1",
    ),
    Script(
        "bootstrap@3.1.1/dist/css/",
        "bootstrap@3.1.1",
        "dist/css/bootstrap.min.css",
        "e9503448692b738dd260fbd7f7cabf2e11f09b600fa97e6eb3a56eba5b1a7e9b",
    ),
)

#: A tag that loads something from another server.
_TAG = re.compile(r"<(script|link)\b[^>]*\b(?:src|href)=\"(https?:)?//([^\"]+)\"[^>]*>")


def localise(html: Path, copies: Path = COPIES) -> bool:
    """Points ``html/index.html`` at copies of its scripts; whether there are any. Raises ValueError
    for a script that nothing here stands for, or a copy with another hash."""
    if not (fetched(copies) or fetch(copies)):
        print("asv's pages will load their scripts from the network: npm is missing, or offline")
        return False
    target = html / FOLDER
    target.mkdir(exist_ok=True)
    for script in SCRIPTS:
        shutil.copy(copies / script.name, target)
    shutil.copy(TABLE_SORT, target)
    page = html / "index.html"
    page.write_text(rewritten(page.read_text("utf-8")), encoding="utf-8")
    return True


def foreign(html: Path) -> list[str]:
    """The addresses of other servers that ``html/index.html`` loads from."""
    return [
        f"{tag[2]}//{tag[3]}" for tag in _TAG.finditer((html / "index.html").read_text("utf-8"))
    ]


def rewritten(page: str) -> str:
    """The page with every foreign address replaced."""
    return _TAG.sub(lambda tag: _local(tag[1], tag[3]), page)


def _local(kind: str, address: str) -> str:
    found = [script.name for script in SCRIPTS if script.url in f"/{address}"]
    if "/stupidtable/" in address:
        found.append(TABLE_SORT.name)
    if len(found) != 1:
        raise ValueError(f"asv's page loads {address}, for which offline.py has no copy")
    where = f"{FOLDER}/{found[0]}"
    if kind == "link":
        return f'<link rel="stylesheet" href="{where}">'
    return f'<script src="{where}" onerror="js_load_failure()">'


def fetched(copies: Path) -> bool:
    """Whether every copy is there and right."""
    return all(_matches(copies / script.name, script) for script in SCRIPTS)


def _matches(path: Path, script: Script) -> bool:
    return path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == script.sha256


def fetch(copies: Path) -> bool:
    """Fetches every script by npm; False where that is not possible."""
    npm = shutil.which("npm")
    if npm is None:
        return False
    packages = sorted({script.package for script in SCRIPTS})
    with tempfile.TemporaryDirectory(prefix="mesp-npm-") as folder:
        command = [npm, "pack", "--silent", "--pack-destination", folder, *packages]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            print(done.stderr.strip(), file=sys.stderr)
            return False
        copies.mkdir(exist_ok=True)
        for script in SCRIPTS:
            _extract(Path(folder), script, copies)
    return True


def _extract(folder: Path, script: Script, copies: Path) -> None:
    name, _, version = script.package.rpartition("@")
    with tarfile.open(folder / f"{name}-{version}.tgz") as package:
        file = package.extractfile(f"package/{script.path}")
        assert file is not None
        content = file.read()
    target = copies / script.name
    target.write_bytes(content)
    if not _matches(target, script):
        target.unlink()
        raise ValueError(f"{script.path} of {script.package} is not the file it should be")
