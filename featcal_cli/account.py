"""Whom the token belongs to, and where it may write."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from featcal_cli.errors import HubError
from featcal_cli.hub_errors import explained_writing
from featcal_cli.patience import patiently

LOGIN = "set HF_TOKEN or run `hf auth login`"
NEW_TOKEN = "make one with write access on the Hub's settings page, and set HF_TOKEN to it"


@dataclass(frozen=True)
class Account:
    """A user as their token shows them."""

    name: str
    """Their name, which is a namespace too; empty where the Hub tells none."""
    namespaces: frozenset[str]
    """Every namespace that they may write to, in lower case."""
    reads_only: frozenset[str]
    """Namespaces of organisations in which they have no right to write, in lower case."""
    role: str
    """The token's: read, write or fineGrained; empty where the Hub tells none."""
    permissions: frozenset[str]
    """What a fine-grained token may do anywhere."""


def read_account(repo_id: str) -> Account:
    """The account of the token in use, which is to push to `repo_id`.

    Raises HubError where there is none, or it is not accepted.
    """
    from huggingface_hub import HfApi, get_token

    if get_token() is None:
        raise HubError("pushing needs a token, and there is none", where=f"--push-to {repo_id}", fix=LOGIN)
    with explained_writing(repo_id):
        return _read(patiently(HfApi().whoami))


def check_role(account: Account, repo_id: str, *, create_pr: bool) -> None:
    """Raise HubError for a token that may only read."""
    needed = {"repo.write", "discussion.write"} if create_pr else {"repo.write"}
    if account.role == "read" or (account.role == "fineGrained" and account.permissions.isdisjoint(needed)):
        raise HubError(f"the token of {account.name} may only read", where=f"--push-to {repo_id}", fix=NEW_TOKEN)


def check_namespace(account: Account, repo_id: str) -> None:
    """Raise HubError where a repo is neither the account's nor one of an organisation of theirs."""
    owner = repo_id.split("/")[0]
    where, other = f"--push-to {repo_id}", f"push to {account.name}/{repo_id.split('/')[1]}"
    if owner.lower() in account.reads_only:
        raise HubError(f"{account.name} may only read in {owner}", where=where, fix=f"ask for the right, or {other}")
    if account.name and owner.lower() not in account.namespaces:
        what = f"{owner} is neither {account.name} nor an organisation that {account.name} is a member of"
        raise HubError(what, where=where, fix=f"{other}, or use a token of a user who may write to {owner}")


def _read(told: Mapping[str, Any]) -> Account:
    name = str(told.get("name") or "")
    roles = {str(org.get("name", "")).lower(): org.get("roleInOrg") for org in told.get("orgs") or []}
    reads_only = {org for org, role in roles.items() if role == "read"}
    token = (told.get("auth") or {}).get("accessToken") or {}
    fine = token.get("fineGrained") or {}
    scopes = fine.get("scoped") or []
    # a fine-grained token shows only the organisations that it was made for, some of them as scopes alone
    scoped = {str((scope.get("entity") or {}).get("name", "")).split("/")[0].lower() for scope in scopes}
    permissions = {permission for scope in scopes for permission in scope.get("permissions") or []}
    return Account(
        name,
        frozenset({name.lower()} | roles.keys() | scoped),
        frozenset(reads_only),
        str(token.get("role") or ""),
        frozenset(permissions | set(fine.get("global") or [])),
    )
