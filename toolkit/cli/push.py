"""toolkit push: what a run could not send to the Hub, or its model."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from toolkit.config import Refusal, read_config_file
from toolkit.config.setting import flag_of
from toolkit.system.console import as_typed, say


def push(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="A run's output directory, or a model directory.")],
    hub_model_id: Annotated[
        str | None,
        typer.Option(
            "--hub-model-id", "--repo-id", metavar="ID",
            help="Repository, as user/name or name. Default: the run's, else your user name and the directory's name.",
        ),
    ] = None,
    private: Annotated[bool | None, typer.Option("--private/--public", help="Whether a new repository is private.")] = None,
    revision: Annotated[str | None, typer.Option(metavar="TEXT", help="Branch. Default: the run's, else main.")] = None,
    message: Annotated[str | None, typer.Option(metavar="TEXT", help="Title of the commit of a model.")] = None,
) -> None:  # fmt: skip
    """Send a model to the Hugging Face Hub, or finish what a run could not send.

    What waits in the run's queue is sent, in order. Where nothing waits, the model: of the run, or of DIR itself. What the
    Hub has already makes no second commit. The token is that of HF_TOKEN or of `hf auth login`.

    Ends with 1 when the Hub can't be reached: nothing is lost, and the command to type later is shown.
    """
    from toolkit.hub.client import NotNow, hub_api
    from toolkit.hub.queue import QUEUE, list_jobs, only_sender

    if not directory.is_dir():
        raise typer.BadParameter(f"{directory}: there is no such directory.", param_hint="DIR")
    queue = directory / QUEUE
    given = {"repo_id": hub_model_id, "private": private, "revision": revision, "message": message}
    given = {name: value for name, value in given.items() if value is not None}
    queue_was_there = queue.exists()
    if not list_jobs(queue):
        _check_holds_a_model(directory)
    elif message:
        raise typer.BadParameter(f"what waits in {queue} has its titles already: leave it out.", param_hint="--message")
    queue.mkdir(exist_ok=True)
    try:
        with only_sender(queue) as alone:
            if not alone:
                raise Refusal(f"{directory}: its run sends to the Hub by itself, or another `toolkit push` does.")
            _send(hub_api(), directory, queue, given)
    except NotNow as error:
        say(f"the Hub can't be reached: {error}. Nothing is lost; later:\n  {_again(directory, given)}", error=True)
        raise typer.Exit(1) from error
    finally:
        if not queue_was_there and not list_jobs(queue):
            shutil.rmtree(queue, ignore_errors=True)


def _send(api: Any, directory: Path, queue: Path, given: dict[str, Any]) -> None:
    from toolkit.hub.client import check_write_access, may_pass, quiet_hub
    from toolkit.hub.queue import list_jobs, write_record
    from toolkit.hub.sender import CannotSend, send_job

    quiet_hub()
    if not list_jobs(queue):
        _queue_model(api, directory, queue, given)
    for queued in list_jobs(queue):
        job = dataclasses.replace(queued, **given)
        repo_id = check_write_access(api, job.repo_id, job.private, job.revision)
        elsewhere = (repo_id, job.revision) != (queued.repo_id, queued.revision)
        job = dataclasses.replace(job, repo_id=repo_id, parent=None if elsewhere else job.parent)
        write_record(job)
        files = job.files
        size = sum(path.stat().st_size for path in files.values())
        say(f"{job.message}: {len(files)} files, {size / 1e6:,.1f} MB, to {repo_id}")
        try:
            send_job(api, job, sleep=time.sleep, tries=6, warn=say)
        except CannotSend as error:
            if not may_pass(error.__cause__ or error):
                raise Refusal(f"the Hub: {job.message} can't be sent: {error}. It is kept in {queue}.") from error
            left = len(list_jobs(queue))
            again = _again(directory, {name: value for name, value in given.items() if name != "message"})  # it has that now
            say(f"{left} commit(s) not sent: {error}. They are kept; later:\n  {again}", error=True)
            raise typer.Exit(1) from error
    say(f"on the Hub: {api.endpoint}/{repo_id}")


def _again(directory: Path, given: Mapping[str, Any]) -> str:
    """The command that was typed, for later: without its options a model would go elsewhere, and to all."""
    words = ["toolkit", "push", str(directory)]
    for name, value in given.items():
        words += [f"--{'private' if value else 'public'}"] if name == "private" else [flag_of(name), str(value)]
    return as_typed(*words)


def _check_holds_a_model(directory: Path) -> None:
    from toolkit.hub.files import is_model

    if not any(is_model(each) for each in (directory / "model", directory) if each.is_dir()):
        raise Refusal(
            f"{directory}: nothing waits to be sent, and there is no model: neither {directory / 'model'} nor the directory "
            "itself holds a config.json or an adapter_config.json."
        )


def _queue_model(api: Any, directory: Path, queue: Path, given: dict[str, Any]) -> None:
    """Put the model of a directory into its queue, so that a push that is cut off can continue."""
    from toolkit.hub.client import check_write_access
    from toolkit.hub.files import collect, is_model, model_files
    from toolkit.hub.queue import Job, add_job
    from toolkit.models.adapter_files import read_adapter_config, warning_of_base

    is_run = (directory / "model").is_dir() and is_model(directory / "model")
    model = directory / "model" if is_run else directory
    written = (directory if is_run else directory.absolute().parent) / "config.yaml"
    settings = read_config_file(written) if written.exists() else {}
    named = directory.absolute()
    name = named.parent.name if not is_run and named.name == "model" else named.name
    wanted = given.get("repo_id") or settings.get("hub_model_id") or name
    private = given.get("private", settings.get("hub_private_repo"))
    revision = given.get("revision", settings.get("hub_revision"))
    repo_id = check_write_access(api, wanted, private, revision)
    if (model / "adapter_config.json").exists():
        warning = warning_of_base(read_adapter_config(model).get("base_model_name_or_path"), model)
        if warning:
            say(warning, error=True)

    job = Job(repo_id, given.get("message") or f"Upload {name}", revision, private)
    add_job(queue, job, "model", lambda files: collect(model_files(model), files))
