"""Without a network nobody waits: the Hub's client would try five times before it looks into its cache."""

import os
import socket
from urllib.parse import urlparse


def stay_offline_without_network() -> None:
    """Put the Hub's libraries into their offline mode when the Hub's name can't even be resolved.

    What was downloaded before is then used at once, and what was not is refused at once. Behind a proxy nothing is judged:
    names are the proxy's business.
    """
    if os.environ.get("HF_HUB_OFFLINE") or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.getaddrinfo(address.hostname, address.port or 443)
    except OSError:
        import datasets
        import huggingface_hub.constants

        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
