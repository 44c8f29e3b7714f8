"""NumPy compiled for the browser, as a file of the site, if the machine that makes the site can download it."""

from __future__ import annotations

import hashlib
import sys
import urllib.error
import urllib.request
from pathlib import Path

SECONDS = 20  # for the CDN to answer


def downloaded(address: str, sha256: str, cache: Path) -> Path | None:
    """The file at this address, kept in `cache`; None, with a line on stderr, if it cannot be downloaded.

    Raises RuntimeError if the file has another hash.
    """
    file = cache / address.rpartition("/")[2]
    if not file.is_file():
        try:
            with urllib.request.urlopen(address, timeout=SECONDS) as answer:
                data = answer.read()
        except (urllib.error.URLError, OSError) as error:
            print(
                f"{address} cannot be downloaded here ({error}), so browsers will load it from there", file=sys.stderr
            )
            return None
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    if (found := hashlib.sha256(file.read_bytes()).hexdigest()) != sha256:
        file.unlink()
        raise RuntimeError(f"{address} is not the file that Pyodide lists: its hash is {found}, and not {sha256}")
    return file
