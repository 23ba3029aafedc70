"""Run uv for an environment, with pip's settings of where packages are.

    PYTHON scripts/setup/uv.py pip install ARGUMENT...

PYTHON is that of the environment, which needs nothing but pip: pip installs uv in it.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

BUILD = Path(__file__).resolve().parent / "locked/build.txt"
PIP = [sys.executable, "-m", "pip"]


def main() -> None:
    uv = Path(sys.executable).with_name("uv")
    if not uv.exists():
        install = ["install", "--quiet", "--no-compile", "--no-deps", "--require-hashes", "--requirement"]
        subprocess.run([*PIP, *install, str(BUILD)], check=True)
    # Several indexes are one, as for pip.
    settings = {"UV_PYTHON": sys.executable, "UV_INDEX_STRATEGY": "unsafe-best-match"}
    os.execve(uv, [str(uv), *sys.argv[1:]], os.environ | settings | settings_of_pip())


def settings_of_pip() -> dict[str, str]:
    """Return pip's settings of where packages are, as uv's environment variables."""
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
    names["cert"] = "SSL_CERT_FILE"
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True).stdout
    settings = {}
    for line in listed.splitlines():  # the last one holds: pip lists the environment after the files
        key, _, value = line.partition("=")
        variable = names.get(key.rpartition(".")[2])
        if variable and variable not in os.environ:
            paths = ast.literal_eval(value).split()
            settings[variable] = ("," if variable == "UV_FIND_LINKS" else " ").join(paths)
    return settings


if __name__ == "__main__":
    main()
