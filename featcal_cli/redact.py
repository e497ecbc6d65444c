"""Secrets taken out of a text that may be shown to others."""

from __future__ import annotations

import os
import re

SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|CREDENTIAL", re.IGNORECASE)
"""In the name of an environment variable, these say that nobody else is to see its value."""
SHORTEST = 6
"""Characters of a secret; shorter values would take ordinary words out."""
HIDDEN = "***"
PATTERNS = (
    (re.compile(r"\bhf_[A-Za-z0-9]{6,}"), f"hf_{HIDDEN}"),
    (re.compile(r"(?i)\b(bearer\s+|authorization\W+basic\s+)[\w.~+/=-]{6,}"), rf"\1{HIDDEN}"),
    (re.compile(r"(?i)([a-z][a-z0-9+.-]*://)[^\s/@]+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?i)(https?://[^\s?#\"']+)\?[^\s\"'#]+"), rf"\1?{HIDDEN}"),  # signed addresses open what they name
)


def redact(text: str) -> str:
    """The text without tokens, passwords in addresses, signatures of addresses, and values of secret variables."""
    secrets = {value for name, value in os.environ.items() if SECRET_NAMES.search(name) and len(value) >= SHORTEST}
    if token := _stored_token():
        secrets.add(token)
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, HIDDEN)
    for pattern, hidden in PATTERNS:
        text = pattern.sub(hidden, text)
    return text


def _stored_token() -> str | None:
    from huggingface_hub import get_token

    return get_token()
