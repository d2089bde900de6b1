"""The agent's web page at `/`: one file without data, whose script reads the other pages. Served by `app`.

The policy in `HEADERS` lets a browser run only the script and style of that file, whose digests it names, and lets the
script read only from this agent. So a name from an engine or a peer cannot become code.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

BODY = Path(__file__).with_name("web_page.html").read_bytes()


def _digests(tag: str) -> str:
    """Return the digests of the contents of all elements `tag`, as a policy names them."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), BODY, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in contents)


HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": (
        f"default-src 'none'; script-src {_digests('script')}; style-src {_digests('style')}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # A new release of the agent has a new page.
    "cache-control": "no-cache",
}
