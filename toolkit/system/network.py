"""Without a network nobody waits: the Hub's client would try five times before it looks into its cache."""

import os
import socket
from urllib.parse import urlparse

CONNECT_SECONDS = 3.0


def stay_offline_without_network() -> None:
    """Put the Hub's libraries into their offline mode when no connection to the Hub can be made within three seconds.

    What was downloaded before is then used at once, and what was not is refused at once. Behind a proxy nothing is judged:
    names are the proxy's business.
    """
    if os.environ.get("HF_HUB_OFFLINE") or any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY")):
        return
    address = urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    port = address.port or {"http": 80}.get(address.scheme, 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=CONNECT_SECONDS).close()
    except OSError:
        import datasets
        import huggingface_hub.constants

        huggingface_hub.constants.HF_HUB_OFFLINE = True
        datasets.config.HF_HUB_OFFLINE = True
