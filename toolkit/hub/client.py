"""The Hub's client as we use it: who we are, whether we may write, and which errors are worth a retry."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from toolkit.config import Refusal
from toolkit.config.conditions import REPOSITORY
from toolkit.system.console import say

if TYPE_CHECKING:
    from huggingface_hub import HfApi

Result = TypeVar("Result")
_LOG_IN = "Set HF_TOKEN to a token with write access, or log in with `hf auth login`."
_TRY_AGAIN = (408, 409, 412, 425, 429)  # and 5xx; 412: someone else committed in between
_LONGEST_WAIT = 60.0
_TRIES = 3


class NotNow(Exception):
    """The Hub can't be reached or is too busy, after several tries."""


def hub_api() -> HfApi:
    """A client of the Hub that HF_ENDPOINT names, with the token of HF_TOKEN or of the login."""
    from huggingface_hub import HfApi

    return HfApi(endpoint=os.environ.get("HF_ENDPOINT"))


def quiet_hub() -> None:
    """Turn off the client's progress bars and all its log lines but errors."""
    from huggingface_hub.utils import disable_progress_bars, logging

    logging.set_verbosity_error()
    disable_progress_bars()


def check_write_access(api: HfApi, repo_id: str, private: bool | None = None, revision: str | None = None) -> str:
    """Make sure that we may write to a repository, which is created if not found; returns its id with the user's name.

    Raises:
        Refusal: no token, one that may not write there, a repository of somebody else, or a public one for what is private.
        NotNow: the Hub can't be reached.
    """
    from huggingface_hub import get_token

    if api.token is None and get_token() is None:
        raise Refusal(f"the Hub: there is no token. {_LOG_IN}")
    if not REPOSITORY.fullmatch(repo_id):
        raise Refusal(f"the Hub: {repo_id} is not a repository name; give another with --hub-model-id.")
    try:
        full = _full_name(api, repo_id)
        patiently(lambda: make_repository(api, full, private, revision))
        patiently(lambda: api.auth_check(full, write=True))
        is_private = patiently(lambda: api.repo_info(full)).private
    except (Refusal, NotNow):
        raise
    except Exception as error:
        raise Refusal(f"the Hub: no write access to {repo_id}: {reason(error)}. {_LOG_IN}") from error
    if private and not is_private:
        raise Refusal(f"the Hub: {public_already(full)}")
    return full


def public_already(repo_id: str) -> str:
    return f"{repo_id} exists and is public. Name another with --hub-model-id, or make it private in its settings."


def _full_name(api: HfApi, repo_id: str) -> str:
    """`user/name` of an id that may lack the user.

    Raises:
        Refusal: the token is read-only, or belongs to somebody else.
    """
    identity = patiently(api.whoami)
    user, role = identity["name"], ((identity.get("auth") or {}).get("accessToken") or {}).get("role")
    if role == "read":
        raise Refusal(f"the Hub: the token of {user} may only read. {_LOG_IN}")
    owners = [user, *(each["name"] for each in identity.get("orgs", []))]
    owner, _, name = repo_id.rpartition("/")
    if (owner or user) not in owners:
        raise Refusal(
            f"the Hub: {repo_id} belongs to {owner}, and the token to {', '.join(owners)}. Use --hub-model-id {user}/{name}, "
            f"or a token of {owner}."
        )
    return f"{owner or user}/{name}"


def make_repository(api: HfApi, repo_id: str, private: bool | None, revision: str | None) -> None:
    """Create a repository, and a branch of it, unless they exist."""
    api.create_repo(repo_id, private=private, exist_ok=True)
    if revision and revision != "main" and not re.fullmatch(r"refs/pr/\d+", revision):
        api.create_branch(repo_id, branch=revision, exist_ok=True)


def patiently(action: Callable[[], Result]) -> Result:
    """What an action returns, with retries if the Hub can't be reached.

    Raises:
        NotNow: after the last try. Any other error comes through as it is.
    """
    for number, wait in enumerate(waiting_times(), start=1):
        try:
            return action()
        except Exception as error:
            if not may_pass(error):
                raise
            if number == _TRIES:
                raise NotNow(reason(error)) from error
            wait = min(max(wait, asked_wait(error)), _LONGEST_WAIT)
            if wait > 5:
                say(f"the Hub: {reason(error)}; retrying in {wait:.0f} s")
            time.sleep(wait)
    raise AssertionError("waiting times have no end")


def waiting_times() -> Iterator[float]:
    """Seconds before the next try: 1, 2, 4 ... 60."""
    wait = 1.0
    while True:
        yield wait
        wait = min(2 * wait, _LONGEST_WAIT)


def may_pass(error: BaseException) -> bool:
    """Whether a retry may succeed: the network, a busy Hub, a commit of somebody else in between."""
    status = _status(error)
    if status is not None:
        return status in _TRY_AGAIN or status >= 500
    from huggingface_hub.errors import LocalTokenNotFoundError

    never = (
        Refusal, ValueError, TypeError, LookupError, AttributeError, FileNotFoundError, PermissionError,
        LocalTokenNotFoundError,
    )  # fmt: skip
    return not any(isinstance(each, never) for each in _causes(error))


def asked_wait(error: BaseException) -> float:
    """The seconds of an answer's Retry-After, up to five minutes."""
    asked = next((value for each in _causes(error) if (value := _header(each, "Retry-After"))), "")
    return min(float(asked), 300.0) if asked.isdigit() else 0.0


def reason(error: BaseException) -> str:
    """An error in one line: its status and the Hub's message, without addresses and request ids."""
    if isinstance(error, Refusal):
        return str(error)
    status = _status(error)
    for each in _causes(error):
        if message := getattr(each, "server_message", None) or _header(each, "X-Error-Message"):
            return f"{status} {message.splitlines()[0]}".rstrip(".")
    if status is not None:
        return f"the Hub answers {status}"
    last = list(_causes(error))[-1]
    words = re.sub(r"https?://\S+", "", str(last)).strip().splitlines()
    return f"{type(last).__name__}{f' ({words[0].strip()})' if words else ''}"


def _status(error: BaseException) -> int | None:
    found = (getattr(getattr(each, "response", None), "status_code", None) for each in _causes(error))
    return next((int(status) for status in found if status is not None), None)


def _header(error: BaseException, name: str) -> str:
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    return str(headers.get(name, ""))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error and what it came from: the client wraps some."""
    each: BaseException | None = error
    while each is not None:
        yield each
        each = each.__cause__
