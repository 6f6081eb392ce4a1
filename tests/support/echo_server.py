"""`python -m support.echo_server <settings as JSON>`: the echo server, started as a user would."""

from __future__ import annotations

import json
import sys

from statewise.runtime.config import checked
from statewise.runtime.server.launch import serve
from support.echo import MODULES

if __name__ == "__main__":
    sys.exit(serve(checked(json.loads(sys.argv[1])), MODULES))
