"""Runs next to the tests, with the SDK imported once: a moto server, and `toolkit` command lines in forks of this process.

Reads questions from standard input and answers each with one line of JSON.
"""

import base64
import functools
import gc
import io
import json
import os
import sys
import tempfile
import threading
import traceback
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

REGION = "eu-west-1"
arrived: list[dict[str, Any]] = []


def recording(application: Any) -> Any:
    """The server, with each CreateTrainingJob kept as it arrived on the wire: moto forgets half of it."""

    def serve(environ: dict[str, Any], start_response: Any) -> Any:
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if environ.get("HTTP_X_AMZ_TARGET", "").endswith("CreateTrainingJob"):
            arrived.append(json.loads(body))
        environ["wsgi.input"] = io.BytesIO(body)
        return application(environ, start_response)

    return serve


def run_toolkit(words: list[str], cwd: str, environment: dict[str, str | None]) -> dict[str, Any]:
    """A command line in a fork; None in the environment removes a variable."""
    arrived.clear()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for name, value in environment.items():
                    os.environ.pop(name, None) if value is None else os.environ.update({name: value})
                os.chdir(cwd)
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
                sys.argv = ["toolkit", *words]
                from toolkit.cli.main import main

                main()
                code = 0
            except SystemExit as exit_:
                code = exit_.code if isinstance(exit_.code, int) else 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return {"code": os.waitstatus_to_exitcode(status), "out": out.read(), "err": err.read(), "requests": list(arrived)}


def refusal(job: dict[str, Any], hyperparameters: dict[str, str], environment: dict[str, str]) -> str | None:
    from toolkit.config import Refusal
    from toolkit.sagemaker_jobs.job import Job
    from toolkit.sagemaker_jobs.limits import check_limits

    try:
        check_limits(Job(**job), hyperparameters, environment)
    except Refusal as refused:
        return str(refused)
    return None


def answer(question: dict[str, Any]) -> Any:
    import boto3

    if "words" in question:
        return run_toolkit(**question)
    if "endpoint" in question:
        return os.environ["AWS_ENDPOINT_URL"]
    if "job" in question:
        return refusal(**question)
    arguments = {
        name: base64.b64decode(value["base64"]) if isinstance(value, dict) and "base64" in value else value
        for name, value in question["arguments"].items()
    }
    result = getattr(boto3.client(question["service"], region_name=REGION), question["operation"])(**arguments)
    if "Body" in result:
        result["Body"] = {"base64": base64.b64encode(result["Body"].read()).decode()}
    return result


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr
    server = make_server("127.0.0.1", 0, recording(DomainDispatcherApplication(create_backend_app)), threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": REGION, "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
    }  # fmt: skip
    import boto3
    from botocore import loaders
    from jsonschema import validators
    from sagemaker.huggingface import HuggingFace  # noqa: F401 - once, for all command lines

    from toolkit.sagemaker_jobs import command, fetch, follow, submit  # noqa: F401

    # The SDK checks its configuration dozens of times a command, and each time the schema that it ships too, for four seconds in all.
    validators.validator_for({}).check_schema = classmethod(lambda *schema, **named: None)

    # botocore reads the files of services anew in each session; nothing changes what is in them.
    read = functools.cache(loaders.JSONFileLoader().load_file)
    loaders.JSONFileLoader.load_file = lambda self, path: read(path)
    for service in ("sagemaker", "s3", "sts", "logs"):
        boto3.client(service)
    gc.freeze()  # what is here is looked at by no collection of a command, whose pages would be copied for it

    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line)), default=str) + "\n")
        answers.flush()
