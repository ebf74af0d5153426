"""Write tests/slurm_options.json: the options of SLURM's commands, by the man pages of its Debian package.

    apt-get download slurm-client && dpkg -x slurm-client_*.deb slurm
    python scripts/slurm_options.py slurm slurm-client_*.deb

Of each command by the names of its options: whether a value is needed, optional or not taken.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

COMMANDS = ("sbatch", "srun", "scancel")
OUT = Path(__file__).parents[1] / "tests/slurm_options.json"
# A heading such as `\fB\-A\fR, \fB\-\-account\fR=<\fIaccount\fR>`, as roff.
HEADING = re.compile(r"^(?:-\w(?:[ =]<.*?>)?, )?--([a-z][\w-]*)(.*)$")


def options_of(page: str) -> dict[str, str]:
    """What each option of a man page takes."""
    found = {}
    paragraph = False
    for line in re.sub(r"\\f[BIRP]", "", page).replace("\\-", "-").splitlines():
        if paragraph and (heading := HEADING.match(line)):
            name, value = heading[1], heading[2]
            kinds = {"=": "needed", "[": "optional", "": "none"}
            found.setdefault(name, kinds[value.strip()[:1]])
        paragraph = line.startswith(".TP")
    return dict(sorted(found.items()))


def main(folder: str, package: str):
    pages = Path(folder, "usr/share/man/man1")
    told = {"source": "man pages of Debian's " + Path(package).name.removesuffix(".deb")}
    for command in COMMANDS:
        with gzip.open(pages / f"{command}.1.gz", "rt", encoding="utf-8") as page:
            told[command] = options_of(page.read())
    OUT.write_text(json.dumps(told, indent=1) + "\n")
    print(told["source"], {command: len(told[command]) for command in COMMANDS})


if __name__ == "__main__":
    main(*sys.argv[1:])
